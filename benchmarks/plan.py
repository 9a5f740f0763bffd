"""Are predicted time, memory and bytes within 25 % of what is measured?

    python benchmarks/plan.py [--fit] [--quick] [--keep FILE]

Random models are written to a temporary folder; each is calibrated by a process of its own, which
measures this machine's rates before and after. `--fit` calibrates the shapes of `plan_shapes.FIT`
and writes the constants of the cost model that fit them best. Then those of `plan_shapes.CHECK`,
other shapes, are predicted and calibrated. Seconds are CPU time, user and system, on one thread;
memory is how far the resident set rose above its level with the merged model.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from plan_shapes import CHECK, FIT, Shape, batches, load_merged, make_model, write_models

from fusion_bench_featcal import SafetensorsExpert, calibrate
from fusion_bench_featcal.plan.constants import Constants, constants
from fusion_bench_featcal.plan.inputs import without_masks
from fusion_bench_featcal.plan.memory import predict_memory, read_bytes
from fusion_bench_featcal.plan.rates import Points, Rates, measure_rates
from fusion_bench_featcal.plan.seconds import Machine, predict_seconds
from fusion_bench_featcal.plan.work import Work, count_work
from fusion_bench_featcal.results.cost import measure

SECONDS = (
    "passes",
    "elements",
    "moments",
    "folds",
    "solves",
    "call_seconds",
    "visit_seconds",
    "byte_seconds",
)
BYTES = ("memory_bytes", "carried", "visited")
TIE = 0.03  # how strongly fitted constants are drawn to where they start
WITHIN = 0.25


def work_of(shape: Shape) -> Work:
    """What a shape's calibration does to a batch."""
    with torch.device("meta"):
        model = make_model(shape)
    return count_work(model, without_masks(next(batches(shape, 0))), shape.settings)


def predicted(shape: Shape, rates: Rates, chosen: Constants) -> dict[str, float]:
    """Seconds, bytes above the start and bytes read."""
    work, settings = work_of(shape), shape.settings
    steps = predict_seconds(work, settings, shape.tasks, Machine(rates, chosen))
    memory = predict_memory(work, settings, shape.tasks, chosen)
    held = memory.peak + (0 if shape.activations == "disk" else memory.parts["activations"])
    return {
        "seconds": sum(steps.values()),
        "memory": held,
        "read": read_bytes(work, settings, shape.tasks),
        **{f"step {name}": seconds for name, seconds in steps.items()},
    }


def measured(shape: Shape, folder: Path) -> dict[str, Any]:
    """Calibrate, in this process: seconds, bytes above the start, bytes read, the rates."""
    small = replace(shape, width=128, blocks=1, tasks=1, samples=4, tokens=16, activations="device")
    run(small, load := make_model(small), {"task_0": load}, load)
    rates = measure_rates()
    merged = load_merged(shape, folder)
    experts = {f"task_{i}": SafetensorsExpert(folder / f"task_{i}") for i in range(shape.tasks)}
    for expert in experts.values():  # files that the system has read before
        for name in expert.names():
            expert.tensor(name).sum()
    base = SafetensorsExpert(folder / "base")
    before, start = psutil.Process().memory_info().rss, cpu_seconds()
    with measure() as cost:
        result = run(shape, merged, experts, base)
    seconds = cpu_seconds() - start
    assert isinstance(cost.peak_rss_bytes, int)
    return {
        "seconds": seconds,
        "wall": cost.seconds,
        "memory": cost.peak_rss_bytes - before,
        "method": cost.peak_rss_method,
        "read": result.log.expert_bytes,
        "rates": asdict(mean(rates, measure_rates())),
    }


def mean(before: Rates, after: Rates) -> Rates:
    """Mean rates: other programs may take their share of the machine in between."""

    def between(first: Points, second: Points) -> Points:
        pairs = zip(first, second, strict=True)
        return tuple((size, (one * other) ** 0.5) for (size, one), (_, other) in pairs)

    kinds = [f.name for f in fields(Rates) if isinstance(getattr(before, f.name), tuple)]
    return replace(before, **{k: between(getattr(before, k), getattr(after, k)) for k in kinds})


def run(shape: Shape, merged: Any, experts: Any, base: Any) -> Any:
    """One calibration."""
    data = {task: batches(shape, index) for index, task in enumerate(experts)}
    return calibrate(merged, base, experts, data, shape.settings, progress=False)


def cpu_seconds() -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure_apart(shape: Shape, repeats: int) -> dict[str, Any]:
    """Write the models and calibrate them in processes of their own; the quickest of them."""
    with tempfile.TemporaryDirectory() as folder:
        write_models(shape, Path(folder))
        again = [sys.executable, __file__, "--measure", shape.dumps(), "--folder", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        found = []
        for _ in range(repeats):
            done = subprocess.run(
                again, check=True, stdout=subprocess.PIPE, text=True, env=environment
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
    best = min(found, key=lambda one: one["seconds"])
    print(f"measured: {shape.name}: {best['seconds']:.1f} s", file=sys.stderr, flush=True)
    return best


def measure_all(shapes: Sequence[Shape], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure shapes; with `--keep` those that the file has not got yet."""
    file = Path(options.keep) if options.keep else None
    kept = json.loads(file.read_text()) if file and file.is_file() else {}
    found = []
    for shape in shapes:
        if shape.dumps() not in kept:
            kept[shape.dumps()] = measure_apart(shape, options.repeats)
            if file:
                file.write_text(json.dumps(kept))
        one = dict(kept[shape.dumps()])
        one["rates"] = Rates(**{k: points(v) for k, v in one["rates"].items()})
        found.append(one)
    return found


def points(value: Any) -> Any:
    """Lists of JSON as the tuples they were."""
    return tuple(map(tuple, value)) if isinstance(value, list) else value


def fit(shapes: Sequence[Shape], found: Sequence[dict[str, Any]]) -> Constants:
    """The constants with the least squared relative error, none far below its start."""
    start = Constants()
    chosen = {}
    for names, key in ((SECONDS, "seconds"), (BYTES, "memory")):
        rows, wanted = [], []
        for shape, one in zip(shapes, found, strict=True):
            zero = replace(start, **dict.fromkeys((*SECONDS, *BYTES), 0.0))
            fixed = predicted(shape, one["rates"], zero)[key]
            units = [replace(zero, **{n: getattr(start, n)}) for n in names]
            parts = [predicted(shape, one["rates"], unit)[key] - fixed for unit in units]
            rows.append([part / one[key] for part in parts])
            wanted.append(1 - fixed / one[key])
        factors = least_squares(torch.tensor(rows), torch.tensor(wanted))
        chosen |= {n: getattr(start, n) * f for n, f in zip(names, factors, strict=True)}
    return Constants(**chosen)


def least_squares(rows: torch.Tensor, wanted: torch.Tensor) -> list[float]:
    """Factors near 1, at least 0.2, by projected steps."""
    rows, wanted = rows.double(), wanted.double()
    factors = torch.ones(rows.shape[1], dtype=torch.float64)
    step = 1 / float(torch.linalg.matrix_norm(rows, 2) ** 2 + TIE)
    for _ in range(50_000):
        slope = rows.T @ (rows @ factors - wanted) + TIE * (factors - 1)
        factors = (factors - step * slope).clamp_min(0.2)
    return factors.tolist()


def table(shapes: Sequence[Shape], found: Sequence[dict[str, Any]], chosen: Constants) -> list[str]:
    """Predicted, measured and ratio for each shape."""
    lines = [
        "| shape | CPU s predicted | measured | ratio | MB predicted | measured | ratio "
        "| MB read predicted | measured |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for shape, one in zip(shapes, found, strict=True):
        plan = predicted(shape, one["rates"], chosen)
        cells = [f"{plan['seconds']:.2f}", f"{one['seconds']:.2f}"]
        cells.append(f"{plan['seconds'] / one['seconds']:.2f}")
        cells += [f"{plan['memory'] / 1e6:.0f}", f"{one['memory'] / 1e6:.0f}"]
        cells.append(f"{plan['memory'] / one['memory']:.2f}")
        cells += [f"{plan['read'] / 1e6:.2f}", f"{one['read'] / 1e6:.2f}"]
        lines.append(f"| {shape.name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Fit if asked to; then check, and say how far off the predictions are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants first")
    parser.add_argument("--quick", action="store_true", help="every third shape only")
    parser.add_argument(
        "--repeats", type=int, default=2, help="runs of a shape; the quickest counts"
    )
    parser.add_argument("--keep", help="file that keeps what was measured, to fit it once more")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        found = measured(Shape(**json.loads(options.measure)), Path(options.folder))
        print(json.dumps(found))
        return
    step = 3 if options.quick else 1
    print(f"torch {torch.__version__}, 1 thread, {platform.machine()}\n")
    chosen = constants()
    if options.fit:
        shapes = FIT[::step]
        runs = measure_all(shapes, options)
        chosen = fit(shapes, runs)
        chosen.write()
        print("\n".join(["Fitted on", "", *table(shapes, runs, chosen), ""]))
    shapes = CHECK[::step]
    runs = measure_all(shapes, options)
    print("\n".join(["Checked on", "", *table(shapes, runs, chosen), ""]))
    plans = [predicted(s, one["rates"], chosen) for s, one in zip(shapes, runs, strict=True)]
    for key in ("seconds", "memory", "read"):
        off = [abs(p[key] / one[key] - 1) for p, one in zip(plans, runs, strict=True)]
        print(
            f"{key}: at most {max(off):.0%} off; {sum(o <= WITHIN for o in off)} of {len(off)} "
            f"within {WITHIN:.0%}"
        )


if __name__ == "__main__":
    main()
