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
from typing import Any
from unittest import mock

from opened_suite import CORRUPTIONS, SAMPLE_KINDS, OpenedSuite, Scores, average, silence
from sides import machine

from fusion_bench_featcal.lab.rivals import SWUDI
from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.run import blocks, trust

METHODS: dict[str, dict[str, Any]] = {
    "plus": {"rule": "plus"},
    "before": {},  # FeatCal+ as in 0.2.0: see `settings_of`
    "vectors": {"rule": Plus(task_vectors_only=True)},
    "paper": {"rule": "paper"},
}
TITLES = {"before": "FeatCal+ 0.2.0", "plus": "FeatCal+", "paper": "the paper's settings"}
FITTING = ("own", *CORRUPTIONS)
PARTLY = ("two", "half", "one", "one_other")
Line = dict[str, Any]


class Measured(Exception):
    """Ends a calibration after the agreement was measured."""


def runs(suite: OpenedSuite, options: argparse.Namespace, known: Sequence[Line]) -> Iterator[Line]:
    """Yield a line for each run that is not known yet."""
    if not options.agreement and not any(line["method"] == "merged" for line in known):
        yield {"method": "merged", "scores": suite.scores(suite.merged)}
        yield {"method": "experts", "scores": suite.expert_scores()}
        if not suite.name.startswith("resnet"):
            yield {"method": "swudi", "scores": suite.scores(suite.merge(SWUDI()))}
    methods = ["agreement"] if options.agreement else options.methods
    for seed in options.seeds:
        for kind in options.kinds:
            for samples in options.samples:
                for method in methods:
                    run = {"kind": kind, "seed": seed, "samples": samples, "method": method}
                    is_known = any(run.items() <= line.items() for line in known)
                    if is_known or (kind in CORRUPTIONS and not suite.has_images):
                        continue
                    yield run | (
                        measured(suite, kind, seed, samples)
                        if options.agreement
                        else calibrated(suite, kind, seed, samples, method)
                    )


def settings_of(method: str, suite: OpenedSuite) -> dict[str, Any]:
    """Return the settings of a method. FeatCal+ 0.2.0 treats few samples as it treats many."""
    if method == "before":
        return {"rule": Plus(lacks=dict.fromkeys(suite.tasks, 1.0))}
    return METHODS[method]


def calibrated(suite: OpenedSuite, kind: str, seed: int, samples: int, method: str) -> Line:
    """Return scores, agreement and seconds of a calibration."""
    # 0.2.0 has no rule for samples that fit no task.
    start, bound = time.perf_counter(), -1e9 if method == "before" else trust.UNLIKE
    with mock.patch.object(trust, "UNLIKE", bound):
        model, log = suite.calibrate(kind, seed, samples, **settings_of(method, suite))
    agreement = [record["agreement"] for record in log.select("agreement")]
    return {
        "agreement": agreement[0] if agreement else None,
        "seconds": time.perf_counter() - start,
        "scores": suite.scores(model),
    }


def measured(suite: OpenedSuite, kind: str, seed: int, samples: int) -> Line:
    """Return agreement and trust, which are measured before the first block."""
    found = list[trust.Trust]()

    def stop(*arguments: Any) -> None:
        found.append(trust.measure_trust(*arguments))
        raise Measured

    with mock.patch.object(blocks, "measure_trust", stop):
        try:
            suite.calibrate(kind, seed, samples, rule="plus")
        except Exception:  # which the run wraps
            if not found:
                raise
    return {"agreement": found[0].agreement, "trust": dict(found[0].by_task)}


def accuracy_table(lines: Sequence[Line], methods: Sequence[str], samples: int) -> str:
    """Return averages of all suites, with the smallest change of a task in brackets."""
    heads = ["suite", "samples", "agreement", "merged", *(TITLES[m] for m in methods), "SWUDI"]
    rows = [f"| {' | '.join(heads)} |", f"|:--|:--|{'--:|' * (len(heads) - 2)}"]
    for suite in dict.fromkeys(line["suite"] for line in lines):
        own = [line for line in lines if line["suite"] == suite]
        references = {line["method"]: line["scores"] for line in own if "kind" not in line}
        chosen = [r for r in own if r.get("samples") == samples and r["method"] in methods]
        for kind in (k for k in SAMPLE_KINDS if any(r["kind"] == k for r in chosen)):
            of_kind = [line for line in chosen if line["kind"] == kind]
            agreements = {f"{r['agreement']:.2f}": None
                          for r in of_kind if r.get("agreement") is not None}  # fmt: skip
            cells = [cell(of_kind, method, references["merged"]) for method in methods]
            merged, swudi = (f"{average(references[m]):.1f}" if m in references else "-"
                             for m in ("merged", "swudi"))  # fmt: skip
            title = f"{SAMPLE_KINDS[kind]}"
            parts = [suite, title, ", ".join(agreements) or "-", merged, *cells, swudi]
            rows.append(f"| {' | '.join(parts)} |")
    return "\n".join(rows)


def cell(lines: Sequence[Line], method: str, merged: Mapping[str, float]) -> str:
    """Return a method's averages by seed, each with the smallest change of a task."""
    chosen = [line for line in lines if line["method"] == method]
    by_seed: dict[int, Scores] = {line["seed"]: line["scores"] for line in chosen}
    return (
        ", ".join(
            f"{average(scores):.1f} ({min(scores[task] - merged[task] for task in merged):+.1f})"
            for _, scores in sorted(by_seed.items())
        )
        or "-"
    )


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
            found = [value for kind in kinds for value in values.get((suite, kind), [])]
            cells.append(f"{min(found):.2f} to {max(found):.2f}" if found else "-")
        rows.append(f"| {suite} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Run and append lines, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("suites", nargs="*")
    parser.add_argument("--kinds", nargs="+", choices=SAMPLE_KINDS, default=["own"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["plus"])
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
        known = [line for line in lines if line["suite"] == name]
        for line in runs(OpenedSuite(name), options, known):
            line = {"suite": name, **line, "machine": machine()}
            with options.results.open("a", encoding="utf-8") as file:
                print(json.dumps(line), file=file)
            shown = {k: v for k, v in line.items() if k not in ("scores", "trust", "machine")}
            result = f" {average(line['scores']):.1f}" if "scores" in line else ""
            print(f"{shown}{result}", flush=True)


if __name__ == "__main__":
    main()
