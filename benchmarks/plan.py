"""Are estimated memory and bytes within 25 % of what is measured, and seconds of the right order?

    python benchmarks/plan.py [--shape 0 --shape 4] [--repeats 2]

Random models of the shapes in `plan_shapes.py` are written to a temporary folder; each shape is
calibrated by a process of its own, after a probe of the machine. Seconds are CPU time, user and
system, on one thread; memory is how far the resident set rose above its level with the merged
model.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from plan_shapes import SHAPES, TARGET, Shape, batches, load_merged, make_model, write_models

from fusion_bench_featcal import SafetensorsExpert, calibrate
from fusion_bench_featcal.plan.estimate import Request, estimate
from fusion_bench_featcal.results.cost import measure

WITHIN = 0.25


def estimated(shape: Shape) -> dict[str, float]:
    """Seconds, bytes above the start, and bytes read."""
    with torch.device("meta"):
        model = make_model(shape)
    request = Request(model, shape.settings, shape.tasks, shape.tokens, TARGET, loaded=1)
    plan = estimate(request)
    return {"seconds": plan.seconds, "memory": plan.host - plan.own, "read": plan.read}


def measured(shape: Shape, folder: Path) -> dict[str, float]:
    """The same of a calibration in this process, and the wall-clock time."""
    small = replace(shape, width=128, blocks=1, tasks=1, samples=4, tokens=16, activations="device")
    run(small, load := make_model(small), {"task_0": load}, load)
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
    assert isinstance(cost.peak_rss_bytes, int) and isinstance(cost.seconds, float)
    memory, read = cost.peak_rss_bytes - before, result.log.expert_bytes
    return {"seconds": seconds, "memory": memory, "read": read, "wall": cost.seconds}


def run(shape: Shape, merged: Any, experts: Any, base: Any) -> Any:
    """One calibration."""
    data = {task: batches(shape, index) for index, task in enumerate(experts)}
    return calibrate(merged, base, experts, data, shape.settings, progress=False)


def cpu_seconds() -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def compare(shape: Shape, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Estimate a shape and calibrate it in processes of their own; the quickest pair."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        write_models(shape, Path(folder))
        again = [sys.executable, __file__, "--measure", shape.dumps(), "--folder", folder]
        for _ in range(repeats):
            done = subprocess.run(
                again,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return min(found, key=lambda pair: pair[1]["seconds"])


def main() -> None:
    """Compare the shapes, and say how far off the estimates are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, action="append", help="index into SHAPES (repeatable)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of a shape; quickest counts")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        shape = Shape(**json.loads(options.measure))
        print(json.dumps([estimated(shape), measured(shape, Path(options.folder))]))
        return
    print(f"torch {torch.__version__}, 1 thread, {platform.machine()}\n")
    kinds = {"seconds": ("CPU s", 1.0), "memory": ("MB", 1e6), "read": ("MB read", 1e6)}
    heads = [f"{head} estimated | measured | ratio" for head, _ in kinds.values()]
    print(f"| shape | {' | '.join(heads)} | wall s |\n|---|{'--:|' * 10}")
    off: dict[str, list[float]] = {kind: [] for kind in kinds}
    for index in options.shape or range(len(SHAPES)):
        plan, found = compare(SHAPES[index], options.repeats)
        cells = []
        for kind, (_, unit) in kinds.items():
            ratio = plan[kind] / found[kind]
            off[kind].append(abs(ratio - 1))
            cells += [f"{plan[kind] / unit:.2f}", f"{found[kind] / unit:.2f}", f"{ratio:.2f}"]
        print(f"| {SHAPES[index].name} | {' | '.join(cells)} | {found['wall']:.0f} |", flush=True)
    print()
    for kind, values in off.items():
        good = sum(value <= WITHIN for value in values)
        print(f"{kind}: at most {max(values):.0%} off; {good} of {len(values)} within {WITHIN:.0%}")


if __name__ == "__main__":
    main()
