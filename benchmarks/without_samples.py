"""Merging without any sample: ASWUDI (`--merge swudi`) beside task arithmetic and SWUDI.

    OMP_NUM_THREADS=1 python benchmarks/without_samples.py RESULTS.jsonl SUITE ...
    python benchmarks/without_samples.py RESULTS.jsonl --table

A run appends one line to RESULTS. Suites with pretrained weights need `make weights` and
FEATCAL_REAL. FeatCal+ from 64 samples of each task is of `benchmarks/results/unlike_samples.jsonl`.
Results: `benchmarks/results/without_samples.md`.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from opened_suite import OpenedSuite, silence
from sides import machine

from fusion_bench_featcal.experts import InMemoryExpert, LazyModel
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.lab.rivals import SWUDI
from fusion_bench_featcal.models.merging import SwudiOnRead
from fusion_bench_featcal.models.structure import fill

WITH_SAMPLES = Path(__file__).parent / "results" / "unlike_samples.jsonl"
TITLES = {
    "merged": "task arithmetic, 0.3", "swudi": "SWUDI, s = 100", "aswudi": "ASWUDI",
    "plus": "FeatCal+, 64 samples", "experts": "experts",
}  # fmt: skip
Line = dict[str, Any]


def measured(name: str) -> Line:
    """Return scores of a suite's models, and each expert's share of directions."""
    suite = OpenedSuite(name)
    base: Any = load_pool_model(suite.pool, BASE_MODEL)
    models = {task: load_pool_model(suite.pool, task) for task in suite.tasks}
    lazy = [LazyModel(n, InMemoryExpert(m), base) for n, m in {"base": base, **models}.items()]
    cpu, start = torch.device("cpu"), time.perf_counter()
    source = SwudiOnRead(lazy[0], lazy[0], lazy[1:], resolve_family("auto", base), cpu)
    merged: Any = load_pool_model(suite.pool, BASE_MODEL)
    fill(merged, source)
    seconds = time.perf_counter() - start
    shares = [source.directions(expert) for expert in lazy[1:]]
    rounded = [LazyModel("rounded", InMemoryExpert(m.bfloat16()), base) for m in models.values()]
    return {
        "suite": name, "seconds": seconds, "directions": shares,
        "directions_bfloat16": [source.directions(expert) for expert in rounded],
        "aswudi": suite.scores(merged), "merged": suite.scores(suite.merged),
        "swudi": suite.scores(suite.merge(SWUDI(time=100.0, rank=1.0))),
        "experts": suite.expert_scores(), "machine": machine(),
    }  # fmt: skip


def table(lines: Sequence[Line], with_samples: Sequence[Line]) -> str:
    """Return averages, with the smallest gap closed of a task in brackets."""
    heads = ["suite", "directions", "rounded to bfloat16", *TITLES.values(), "seconds of ASWUDI"]
    rows = [f"| {' | '.join(heads)} |", f"|:--|{'--:|' * (len(heads) - 1)}"]
    for line in lines:
        own = {"suite": line["suite"], "kind": "own", "method": "plus", "samples": 64, "seed": 42}
        plus = [other["scores"] for other in with_samples if own.items() <= other.items()]
        scores = {name: line.get(name) or (plus[0] if plus else None) for name in TITLES}
        shares = (f"{min(line[n]):.3f} to {max(line[n]):.3f}"
                  for n in ("directions", "directions_bfloat16"))  # fmt: skip
        cells = [cell(name, value, scores) for name, value in scores.items()]
        rows.append(f"| {' | '.join([line['suite'], *shares, *cells])} | {line['seconds']:.1f} |")
    return "\n".join(rows)


def cell(name: str, scores: Mapping[str, float] | None, others: Mapping[str, Any]) -> str:
    """Return an average, and for methods the change of the task that gains least."""
    if scores is None:
        return "-"
    average = f"{mean(scores.values()):.1f}"
    if name in ("merged", "experts"):
        return average
    return f"{average} ({min(scores[t] - others['merged'][t] for t in scores):+.1f})"


def main() -> None:
    """Measure suites, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("suites", nargs="*")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        files = (options.results, WITH_SAMPLES)
        both = [[json.loads(row) for row in f.read_text("utf-8").splitlines()] for f in files]
        print(table(*both))
        return
    silence()
    for name in options.suites:
        line = measured(name)
        with options.results.open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)
        print({key: round(mean(line[key].values()), 1) for key in TITLES if key in line}, name)


if __name__ == "__main__":
    main()
