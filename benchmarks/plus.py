"""Gain of FeatCal+, and of each of its parts, on the bundled suites.

    python benchmarks/plus.py --pool clip-vit-mini_TA6 --samples 8 64 --seeds 42 43
    python benchmarks/plus.py --pool llama-mini_TA6 --samples 64 --rows published

Every row is a calibration of the same merged model (task arithmetic) on the same samples, made by
the command line; the seed draws the samples. Accuracies are on test data; seconds are those of the
calibration, with one thread, and mean something on an idle machine only.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import track

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.results.long_table import worst_task
from fusion_bench_featcal.settings import PLUS

PAPER = {name: getattr(FeatCalSettings, name) for name in PLUS}
# The paper's settings for each kind of model; on language models on the positions that do best.
PAPERS: dict[str, dict[str, Any]] = {
    "clip": {},
    "text": {
        "ridge_lambda": 1e-5, "mix_alpha": 0.6, "decoder_rows": "targets", "calibrate_norm": False
    },
}  # fmt: skip
ONE: dict[str, Any] = {"task_weights": None}
PARTS: dict[str, dict[str, Any]] = {
    "published": PAPER,
    "published, with copies": PAPER | {"augment": "auto"},
    "without copies": {"augment": None},
    "wider jitter": {
        "augment": {
            "_target_": "fusion_bench_featcal.streams.augmentation.Jitter",
            "degrees": 16,
            "scale": 0.16,
            "shift": 0.16,
        }
    },
    "all samples in the solves": ONE | {"held_out": 0},
    "one calibration": ONE,
    "samples alone": {"rule": {"_target_": "fusion_bench_featcal.rules.plus.Plus", "gamma": 0.0}},
    "block order": {"rule": {"_target_": "fusion_bench_featcal.studies.ablations.AllAtOnce"}},
}


def presets(pool: str, wanted: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Settings by row, as they differ from FeatCal+'s; names are keys of a YAML."""
    text = "clip" not in pool
    rows = {name: PARTS[name] for name in PARTS if not wanted or name in wanted}
    copies = ["published, with copies", "without copies", "wider jitter"]
    for name in copies if text else ():  # rows that are like others
        rows.pop(name, None)
    papers = PAPERS["text" if text else "clip"]
    return {
        name.replace(", ", "-").replace(" ", "_"): change | papers
        if name.startswith("published")
        else change
        for name, change in rows.items()
    }


def run(
    pool: str,
    samples: int,
    seed: int,
    rows: Mapping[str, Any],
    folder: Path,
    cwd: Path | None = None,
) -> Any:
    """Run the command; the content of its report.

    Args:
        pool: The model pool.
        samples: Samples a task.
        seed: Draws them.
        rows: Settings by name, each a calibration besides FeatCal+'s.
        folder: For the run's log.
        cwd: Folder to run in, whose `config` may define the pool; None: `folder`.
    """
    command = [
        "fusion_bench",
        "method=featcal/plus",
        f"modelpool={pool}",
        f"method.samples_per_task={samples}",
        f"method.seed={seed}",
        "method.compare_with=[experts,merged]",
        "method.presets=" + json.dumps(rows).replace('"', ""),
        f"path.log_dir={folder}",
    ]
    found = subprocess.run(command, capture_output=True, text=True, cwd=cwd or folder)
    if found.returncode:
        sys.exit(found.stdout[-3000:] + found.stderr[-3000:])
    return json.loads(next(folder.rglob("report.json")).read_text())


def figures(report: Any, row: str) -> tuple[float, ...]:
    """Average, worst task, least share of a task's gap that was recovered (%), and seconds.

    Gaps are those of a point or more, as in reports.
    """
    own, tasks = report["rows"][row], report["tasks"]
    merged, experts = (report["rows"][name] for name in (report["upstream"], "experts"))
    found = worst_task(own, merged, experts)
    gap = found[1] if found and found[1] is not None else float("nan")
    seconds = report["cost"].get(row, {}).get("seconds", 0.0)
    shares = [own["average"], min(own[task] for task in tasks), gap]
    return *(100 * share for share in shares), seconds


def table(reports: Mapping[int, list[Any]]) -> str:
    """A Markdown table with a row for each number of samples and calibration."""
    lines = [
        "| images or texts a task | row | average | worst task | its gap recovered | seconds |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for samples, found in reports.items():
        upstream = found[0]["upstream"]
        names = ["experts", upstream, "featcal"]
        names += [name for name in found[0]["rows"] if name.startswith("featcal:")]
        for name in names:
            values = [figures(report, name) for report in found]
            average, worst, gap, seconds = map(statistics.mean, zip(*values, strict=True))
            shown = "**FeatCal+**" if name == "featcal" else name.removeprefix("featcal:")
            spread = [value[0] for value in values]
            own = name.startswith("featcal")
            lines.append(
                f"| {samples} | {shown.replace('_', ' ')} | {average:.1f}"
                + (f" ({min(spread):.1f} to {max(spread):.1f})" if own else "")
                + f" | {worst:.1f} | {f'{gap:.0f} %' if own else '-'} |"
                + (f" {seconds:.1f} |" if own else " - |")
            )
    return "\n".join(lines)


def machine(report: Any) -> str:
    """Processor, threads and versions of a run."""
    device, versions = report["device"], report["versions"]
    return (
        f"{device['cpu']}, {os.environ['OMP_NUM_THREADS']} thread, torch {versions['torch']}, "
        f"transformers {versions['transformers']}"
    )


def publish(parts: Iterable[str], out: Path | None) -> None:
    """Print paragraphs, and write them into a Markdown file if one is named."""
    text = "\n\n".join(parts)
    print(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Read the options, run everything and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pool", default="clip-vit-mini_TA6")
    parser.add_argument("--samples", type=int, nargs="+", default=[64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument(
        "--rows", nargs="*", default=[], help=f"of {', '.join(PARTS)}; default: all"
    )
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = presets(options.pool, options.rows)
    jobs = [(samples, seed) for samples in options.samples for seed in options.seeds]
    reports: dict[int, list[Any]] = {}
    for samples, seed in track(jobs, console=Console(stderr=True)):
        with TemporaryDirectory() as folder:
            reports.setdefault(samples, []).append(
                run(options.pool, samples, seed, rows, Path(folder))
            )
    report = reports[options.samples[0]][0]
    print(
        f"`python benchmarks/plus.py {shlex.join(sys.argv[1:])}`: {report['suite']}, "
        f"{report['upstream']}, test data, mean of {len(options.seeds)} draws (least and most "
        f"in brackets); {machine(report)}\n"
    )
    print(table(reports))


if __name__ == "__main__":
    main()
