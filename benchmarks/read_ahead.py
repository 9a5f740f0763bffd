"""Seconds of a calibration from slow files, with and without the block that is read ahead.

    OMP_NUM_THREADS=1 python benchmarks/read_ahead.py [--rates 50 100 200]

Experts with random weights are read at a fixed rate: each read waits until its bytes would have
arrived, as it does for files that are not in the page cache. The first row of seconds is without
any wait. Without reading ahead, the same code reads each block when it is needed.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from random_models import WIDTHS, batches, load, write_models
from sides import Costs, costs_of, finish, in_turns, machine, start, table
from torch import Tensor

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.experts.expert import LazyModel

WHEN_NEEDED, AHEAD = "read when needed", "read ahead"


class SlowExpert(SafetensorsExpert):
    """Files that are read at a rate in MB per second."""

    rate = 0.0

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, and wait for the rest of its time."""
        start = time.perf_counter()
        tensor = super().tensor(name)
        if self.rate:
            rest = tensor.nbytes / (self.rate * 1e6) - (time.perf_counter() - start)
            time.sleep(max(0.0, rest))
        return tensor


def print_costs(options: argparse.Namespace) -> None:
    """Measure one side, and print its costs."""
    folder, names = Path(options.folder), [f"task_{i}" for i in range(options.tasks)]
    if options.side == WHEN_NEEDED:
        LazyModel.read_ahead = lambda self, names: None  # type: ignore[method-assign]
    SlowExpert.rate = options.rate
    merged = load(folder / "merged", options.model, options.layers)
    inputs = {n: list(batches(options.model, i, options.samples)) for i, n in enumerate(names)}
    experts = {name: SlowExpert(folder / name) for name in names}
    settings = FeatCalSettings(samples_per_task=options.samples)
    base = SafetensorsExpert(folder / "base")
    _, costs = costs_of(lambda: calibrate(merged, base, experts, inputs, settings, progress=False))
    print(json.dumps(costs))


def main() -> None:
    """Print a table of both sides for each rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=WIDTHS, default="llama-small")
    for name, value in {"layers": 4, "tasks": 4, "samples": 64, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rates", type=float, nargs="+", default=[0, 50, 100, 200])
    for name, kind in {"folder": str, "side": str, "rate": float}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print_costs(options)
        return
    sizes = f"{options.layers} blocks, {options.tasks} tasks, {options.samples} samples per task"
    with TemporaryDirectory() as folder:
        write_models(Path(folder), options.model, options.layers, options.tasks)
        print(f"{options.model}, {sizes}, turns: {options.repeats}. {machine()}")
        for rate in options.rates:

            def measure(side: str, rate: float = rate) -> Costs:
                return finish(start("--folder", folder, "--side", side, "--rate", rate))

            costs = in_turns((WHEN_NEEDED, AHEAD), options.repeats, measure)
            speed = f"{rate:g} MB/s" if rate else "without waits"
            print(f"\nExperts read {speed}:\n\n{table(costs)}", flush=True)


if __name__ == "__main__":
    main()
