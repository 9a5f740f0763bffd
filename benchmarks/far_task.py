"""A seventh task on a bundled text suite that its base never saw, with an expert far from the base.

    python benchmarks/far_task.py --folder my_far_task --texts banking77.parquet

trains the experts from the suite's base, writes them with their data and YAML files into the folder
(unless they are there), calibrates the merged model of all seven tasks and prints a table. The
texts are those of a file with the columns text, label and split (train, calibration, test) whose
labels the suite's task banking77 does not have. Further calibrations of the same pool:

    python benchmarks/far_task.py --folder my_far_task --rows '{drift: {task_weights: drift}}'

adds rows with other settings than FeatCal+'s. In the folder itself `fusion_bench method=...
modelpool=llama-mini_far` runs any method; docs/tasks.md says how such a pool is written.
"""

import argparse
import copy
import json
import os
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from plus import PAPER, PAPERS, figures, machine, publish, run
from pyarrow import parquet
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.suites import text

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "suites"))
from build_suite import save_half
from text_builder import Phase, TextBuilder

TASK = text.TextTask("banking_other", "account matter")
LABELS = 24  # those with the most texts: an expert of fewer texts a label is not accurate
CALIBRATION = 192
# Strength of the expert -> its training.
PHASES = {
    "llama-mini": {"far": Phase(1200, 32, 1e-3, 0.01), "gentle": Phase(700, 32, 6e-4, 0.01)},
}

Rows = dict[str, list[dict[str, str]]]


class FarBuilder(TextBuilder):
    """Trains an expert of the new task from a suite's base, with the suite's tokenizer."""

    def __init__(self, suite: str, phase: Phase, rows: Rows) -> None:
        """Keep the task's rows by split."""
        self.encoder = TextEncoder(AutoTokenizer.from_pretrained(text.path(suite)), "causal")
        self.suite, self.tasks, self.seed, self.log = suite, (TASK.name,), 0, print
        self.recipe = replace(self.RECIPES[suite], finetuning=phase)
        self._rows = rows

    def rows(self, task: str, split: str) -> Any:
        """The new task's prompts and targets."""
        return self._rows[split]


def read_rows(path: Path) -> Rows:
    """Prompts and targets by split, without the labels that the suite's banking77 has."""
    table = parquet.read_table(path, columns=["text", "label", "split"]).to_pylist()
    known = {label for rows in text.load_rows("banking77").values() for _, label in rows}
    counts = Counter(row["label"] for row in table if row["label"] not in known)
    chosen = set(sorted(counts, key=lambda label: (-counts[label], label))[:LABELS])
    found: Rows = {split: [] for split in text.SPLITS}
    for row in table:
        if row["label"] in chosen:
            made = {"prompt": TASK.prompt(row["text"]), "target": TASK.target(row["label"])}
            found[row["split"]].append(made)
    if not all(found.values()):
        sys.exit(f"{path} has no labels besides those of the suite's banking77, or lacks a split")
    missing = max(0, CALIBRATION - len(found["calibration"]))
    if missing:  # taken from the expert's training data, which ends there
        found["calibration"] += found["train"][-missing:]
        found["train"] = found["train"][:-missing]
    return found


def load(suite: str, name: str = "pretrained") -> Any:
    """One of the suite's models, float32."""
    return AutoModelForCausalLM.from_pretrained(text.path(suite, name)).float().eval()


def distance(model: nn.Module, base: nn.Module) -> float:
    """Norm of the difference of all parameters."""
    squares = [
        (value.detach() - base.get_parameter(name).detach()).square().sum()
        for name, value in model.named_parameters()
    ]
    return float(torch.stack(squares).sum().sqrt())


def build(folder: Path, suite: str, strength: str, texts: Path | None) -> dict[str, Any]:
    """Write one expert with its data and pool, unless they are there; what is known of it."""
    pool, place = f"{suite}_{strength}", folder / f"{suite}_{strength}"
    facts = place / "MEASURED.json"
    if facts.is_file():
        return json.loads(facts.read_text())
    if texts is None:
        sys.exit(f"{place} holds no expert yet: --texts names the file to train it on")
    rows, base, phase = read_rows(texts), load(suite), PHASES[suite][strength]
    builder = FarBuilder(suite, phase, rows)
    expert = copy.deepcopy(base).requires_grad_(True)
    builder.finetune(expert, TASK.name)
    place.mkdir(parents=True, exist_ok=True)
    save_half(*builder.expert_part(expert), builder.spelled_out, place / "expert")
    for split, content in rows.items():
        lines = [json.dumps(row) for row in content]
        (place / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = folder / "config" / "modelpool"
    config.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump(pool_yaml(suite, place), sort_keys=False)
    (config / f"{pool}.yaml").write_text(content, encoding="utf-8")
    others = [distance(load(suite, task), base) for task in text.TA6]
    measured = {
        "expert": builder.accuracy(expert.eval(), TASK.name),
        "base": builder.accuracy(base, TASK.name),
        "distance": distance(expert, base),
        "other distances": [min(others), max(others)],
        "steps": phase.steps,
        "learning rate": phase.learning_rate,
        "rows": {split: len(content) for split, content in rows.items()},
    }
    facts.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    return measured


def pool_yaml(suite: str, place: Path) -> dict[str, Any]:
    """The model pool: the suite's, and the new task."""

    def data(split: str) -> dict[str, Any]:
        path = str((place / f"{split}.jsonl").resolve())
        return {"_target_": "datasets.Dataset.from_json", "path_or_paths": path}

    return {
        "defaults": [f"{suite}_TA6", "_self_"],
        "models": {TASK.name: str((place / "expert").resolve())},
        "train_datasets": {TASK.name: data("calibration")},
        "test_datasets": {TASK.name: data("test")},
        "default_taskpool": {"test_datasets": {TASK.name: data("test")}},
    }


def table(reports: list[Any]) -> str:
    """A Markdown table of one pool's calibrations, means over draws."""
    lines = [
        "| row | average | far task | worst task | worst gap recovered |",
        "|---|--:|--:|--:|--:|",
    ]
    upstream = reports[0]["upstream"]
    names = ["experts", upstream, "featcal"]
    names += [name for name in reports[0]["rows"] if name.startswith("featcal:")]
    for name in names:
        values = [
            (*figures(report, name)[:3], 100 * report["rows"][name][TASK.name])
            for report in reports
        ]
        average, worst, gap, far = map(statistics.mean, zip(*values, strict=True))
        shown = "FeatCal+" if name == "featcal" else name.removeprefix("featcal:")
        recovered = f"{gap:.0f} %" if name.startswith("featcal") else "-"
        lines.append(
            f"| {shown.replace('_', ' ')} | {average:.1f} | {far:.1f} | {worst:.1f} | {recovered} |"
        )
    return "\n".join(lines)


def calibrated(
    folder: Path, pool: str, samples: int, seeds: list[int], rows: Mapping[str, Any]
) -> list[Any]:
    """Reports of one calibration for each draw."""
    reports = []
    for seed in seeds:
        with TemporaryDirectory() as logs:
            reports.append(run(pool, samples, seed, rows, Path(logs), cwd=folder))
    return reports


def main() -> None:
    """Build what is missing, calibrate, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--texts", type=Path, help="parquet file; needed once")
    parser.add_argument("--suite", choices=PHASES, default="llama-mini")
    parser.add_argument("--strengths", nargs="+", default=["far", "gentle"])
    parser.add_argument("--samples", type=int, nargs="+", default=[256])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--rows", type=yaml.safe_load, default={}, help="name -> settings, YAML")
    parser.add_argument("--out", type=Path, help="Markdown file")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = {"published": PAPER | PAPERS["text"], **options.rows}
    shown = ["--suite", options.suite, "--samples", *map(str, options.samples)]
    shown += ["--seeds", *map(str, options.seeds)]
    parts: list[str] = []
    reports: list[Any] = []
    for strength in options.strengths:
        facts = build(options.folder, options.suite, strength, options.texts)
        near = " to ".join(f"{value:.1f}" for value in facts["other distances"])
        parts.append(
            f"**{strength}** ({facts['steps']} steps at {facts['learning rate']:g}): expert "
            f"{100 * facts['expert']:.1f} %, base {100 * facts['base']:.1f} %, "
            f"{facts['distance']:.1f} from the base; the suite's experts {near}."
        )
        for samples in options.samples:
            pool = f"{options.suite}_{strength}"
            reports = calibrated(options.folder, pool, samples, options.seeds, rows)
            parts += [f"{samples} texts a task:", table(reports)]
    head = (
        f"`python benchmarks/far_task.py --folder ... --texts ... {shlex.join(shown)}`, task "
        f"arithmetic, test data, mean of {len(options.seeds)} draws; {machine(reports[0])}. Gaps "
        "that are recovered are those of the worst task."
    )
    publish([head, *parts], options.out)


if __name__ == "__main__":
    main()
