"""FeatCal+ with samples that are not the tasks' own, beside the merged model and other methods.

    OMP_NUM_THREADS=1 python benchmarks/unlike_samples.py RESULTS.jsonl SUITE --kinds first mix \
        [--methods plus] [--seeds 42 43] [--samples 64]
    python benchmarks/unlike_samples.py RESULTS.jsonl --table

A run appends one line to RESULTS and is not repeated if the file has it. `--agreement` measures
the agreement of samples and experts alone, which takes seconds. Suites with pretrained weights need
`make weights` and FEATCAL_REAL. Results: `benchmarks/results/unlike_samples.md`.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

from opened_suite import CORRUPTIONS, SAMPLE_KINDS, OpenedSuite, Scores, silence
from sides import machine

from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.run import blocks, trust
from fusion_bench_featcal.run.state import CalibrationState

METHODS: dict[str, dict[str, Any]] = {
    "plus": {"rule": "plus"},
    "vectors": {"rule": Plus(task_vectors_only=True)},
    "paper": {"rule": "paper"},
}
WITHOUT_SAMPLES = Path(__file__).parent / "results" / "without_samples.jsonl"
TITLES = {"before": "FeatCal+ 0.2.0", "plus": "FeatCal+", "paper": "the paper's settings"}
PARTLY = ("two", "half", "one", "one_other")
Line = dict[str, Any]


class Measured(Exception):
    """Ends a calibration after the agreement was measured."""


def runs(
    suite: OpenedSuite, options: argparse.Namespace, earlier: Sequence[Line]
) -> Iterator[Line]:
    """Yield a line for each run that is not known yet."""
    if not options.agreement and not any(line["method"] == "merged" for line in earlier):
        yield {"method": "merged", "scores": suite.scores(suite.merged)}
        yield {"method": "experts", "scores": suite.expert_scores()}
    methods = ["agreement"] if options.agreement else options.methods
    for seed in options.seeds:
        for kind in options.kinds:
            for samples in options.samples:
                for method in methods:
                    run = {"kind": kind, "seed": seed, "samples": samples, "method": method}
                    is_known = any(run.items() <= line.items() for line in earlier)
                    if is_known or (kind in CORRUPTIONS and not suite.has_images):
                        continue
                    yield run | (
                        measured(suite, kind, seed, samples)
                        if options.agreement
                        else calibrated(suite, kind, seed, samples, method)
                    )


def settings_of(method: str, suite: OpenedSuite) -> dict[str, Any]:
    """Return the settings of a method.

    FeatCal+ 0.2.0 treats few samples as it treats many, and uses samples that fit no task.
    """
    if method == "before":
        return {"rule": Plus(lacks=dict.fromkeys(suite.tasks, 1.0), task_vectors_only=False)}
    return METHODS[method]


def calibrated(suite: OpenedSuite, kind: str, seed: int, samples: int, method: str) -> Line:
    """Return scores, agreement and seconds of a calibration."""
    start = time.perf_counter()
    model, log = suite.calibrate(kind, seed, samples, **settings_of(method, suite))
    agreement = [record["agreement"] for record in log.select("agreement")]
    return {
        "agreement": agreement[0] if agreement else None,
        "seconds": time.perf_counter() - start,
        "scores": suite.scores(model),
    }


def measured(suite: OpenedSuite, kind: str, seed: int, samples: int) -> Line:
    """Return agreement and trust, which are measured before the first block."""
    lines = list[Line]()

    def stop(state: CalibrationState, *arguments: Any) -> None:
        by_task = dict(trust.measure_trust(state, *arguments).by_task)
        (record,) = state.log.select("agreement")
        lines.append({"agreement": record["agreement"], "trust": by_task})
        raise Measured

    with mock.patch.object(blocks, "measure_trust", stop):
        try:
            suite.calibrate(kind, seed, samples, rule="plus")
        except Exception:  # which the run wraps
            if not lines:
                raise
    return lines[0]


def accuracy_table(lines: Sequence[Line], methods: Sequence[str], samples: int) -> str:
    """Return averages of all suites, with the smallest change of a task in brackets."""
    heads = ["suite", "samples", "agreement", "merged", *(TITLES[m] for m in methods), "ASWUDI"]
    without = [json.loads(text) for text in WITHOUT_SAMPLES.read_text("utf-8").splitlines()]
    aswudi = {line["suite"]: f"{mean(line['aswudi'].values()):.1f}" for line in without}
    rows = [f"| {' | '.join(heads)} |", f"|:--|:--|{'--:|' * (len(heads) - 2)}"]
    for suite in dict.fromkeys(line["suite"] for line in lines):
        suite_lines = [line for line in lines if line["suite"] == suite]
        references = {r["method"]: r["scores"] for r in suite_lines if "kind" not in r}
        chosen = [r for r in suite_lines if r.get("samples") == samples and r["method"] in methods]
        for kind in (k for k in SAMPLE_KINDS if any(r["kind"] == k for r in chosen)):
            kind_lines = [line for line in chosen if line["kind"] == kind]
            agreements = {f"{r['agreement']:.2f}": None
                          for r in kind_lines if r.get("agreement") is not None}  # fmt: skip
            cells = [cell(kind_lines, method, references["merged"]) for method in methods]
            merged = f"{mean(references['merged'].values()):.1f}"
            facts = [suite, SAMPLE_KINDS[kind], ", ".join(agreements) or "-", merged]
            rows.append(f"| {' | '.join([*facts, *cells, aswudi.get(suite, '-')])} |")
    return "\n".join(rows)


def cell(lines: Sequence[Line], method: str, merged: Mapping[str, float]) -> str:
    """Return a method's averages by seed, each with the smallest change of a task."""
    texts = []
    for line in sorted(lines, key=lambda line: line.get("seed", 0)):
        if line["method"] == method:
            scores: Scores = line["scores"]
            least = min(scores[task] - merged[task] for task in merged)
            texts.append(f"{mean(scores.values()):.1f} ({least:+.1f})")
    return ", ".join(texts) or "-"


def agreement_table(lines: Sequence[Line]) -> str:
    """Return the smallest and the largest agreement by suite and group of kinds."""
    values = defaultdict[tuple[str, str], list[float]](list)
    for line in lines:
        if line["method"] == "agreement" and line["agreement"] is not None:
            values[line["suite"], line["kind"]].append(line["agreement"])
    groups = {
        "own": ("own",), "fog, noise, blur": CORRUPTIONS,
        "of no task, of one task for all, mixes, exchanged":
            ("first", "last", "next", "mix", "unrelated", "random"),
        "mixes, another part for each": ("parts",),
        **{SAMPLE_KINDS[kind]: (kind,) for kind in PARTLY},
    }  # fmt: skip
    rows = [f"| suite | {' | '.join(groups)} |", f"|:--|{'--:|' * len(groups)}"]
    for suite in dict.fromkeys(suite for suite, _ in values):
        cells = []
        for kinds in groups.values():
            group = [value for kind in kinds for value in values.get((suite, kind), [])]
            cells.append(f"{min(group):.2f} to {max(group):.2f}" if group else "-")
        rows.append(f"| {suite} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Run and append lines, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("suites", nargs="*")
    parser.add_argument("--kinds", nargs="+", choices=SAMPLE_KINDS, default=["own"])
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, "before"], default=["plus"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43])
    parser.add_argument("--samples", nargs="+", type=int, default=[64])
    parser.add_argument("--agreement", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    text = options.results.read_text("utf-8") if options.results.exists() else ""
    lines: list[Line] = [json.loads(line) for line in text.splitlines()]
    if options.table:
        print(agreement_table(lines))
        for samples in options.samples:
            print(f"\n{samples} samples per task\n")
            print(accuracy_table(lines, ("before", "plus", "paper"), samples))
        return
    silence()
    for name in options.suites:
        earlier = [line for line in lines if line["suite"] == name]
        for line in runs(OpenedSuite(name), options, earlier):
            line = {"suite": name, **line, "machine": machine()}
            with options.results.open("a", encoding="utf-8") as file:
                print(json.dumps(line), file=file)
            summary = {k: v for k, v in line.items() if k not in ("scores", "trust", "machine")}
            result = f" {mean(line['scores'].values()):.1f}" if "scores" in line else ""
            print(f"{summary}{result}", flush=True)


if __name__ == "__main__":
    main()
