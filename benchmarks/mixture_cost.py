"""CPU seconds and peak memory per block of a mixture, beside a dense model of as many weights.

    OMP_NUM_THREADS=1 python benchmarks/mixture_cost.py [--samples 16] [--layers 2]

The mixture has 32 routed experts, of which a token takes 4. Models have random weights, those of
the experts are in files. Memory is what a calibration adds to that of the loaded merged model.
"""

import argparse
import json
import logging
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from random_models import TOKENS, batches, load, write_models
from sides import Costs, finish, in_turns, machine, start, table

from fusion_bench_featcal import Paper, Plus, SafetensorsExpert, calibrate
from fusion_bench_featcal.results.cost import measure

SIDES = {"dense": "qwen3-small", "mixture": "qwen3moe-small"}
RULES = {"paper": Paper(), "plus": Plus()}
TASKS = ("task_0", "task_1", "task_2")


def print_costs(options: argparse.Namespace) -> None:
    """Calibrate one model, and print its costs per block."""
    name, folder = SIDES[options.side], Path(options.folder) / options.side

    def run(model: Any, experts: dict[str, Any], base: Any, samples: int) -> None:
        inputs = {task: batches(name, index, samples) for index, task in enumerate(TASKS)}
        calibrate(model, base, experts, inputs, RULES[options.rule], samples_per_task=samples,
                  progress=False)  # fmt: skip

    small = load(folder / "merged", name, 2)  # first, so that lazily imported modules are resident
    run(small, dict.fromkeys(TASKS, small), small, 1)
    del small
    merged = load(folder / "merged", name, options.layers)
    experts = {task: SafetensorsExpert(folder / task) for task in TASKS}
    before, seconds = psutil.Process().memory_info().rss, time.process_time()
    with measure() as cost:
        run(merged, experts, SafetensorsExpert(folder / "base"), options.each)
    per_block = (time.process_time() - seconds) / options.layers
    assert cost.peak_rss_bytes is not None
    peak = cost.peak_rss_bytes - before
    print(json.dumps({"CPU per block, s": per_block, "peak memory, MB": peak / 1e6}))


def main() -> None:
    """Print a table for each rule and number of samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[16])
    parser.add_argument("--layers", type=int, default=2)
    for name in ("--folder", "--side", "--rule", "--each"):
        parser.add_argument(name, help=argparse.SUPPRESS, type=int if name == "--each" else str)
    options = parser.parse_args()
    if options.side:
        logging.disable(logging.WARNING)
        print_costs(options)
        return
    with TemporaryDirectory() as folder:
        for side, name in SIDES.items():
            write_models(Path(folder) / side, name, options.layers, len(TASKS))
        print(f"{options.layers} blocks, {len(TASKS)} experts. {machine()}")
        for rule in RULES:
            for samples in options.samples:
                words = ("--folder", folder, "--rule", rule, "--each", samples)

                def cost(side: str, words: tuple[object, ...] = words) -> Costs:
                    return finish(start("--side", side, *words))

                print(f"\n{rule}, {samples} samples of {TOKENS} tokens per task\n")
                print(table(in_turns(SIDES, 2, cost)), flush=True)


if __name__ == "__main__":
    main()
