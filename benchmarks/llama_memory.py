"""Peak memory of a calibration of a language model beside the bound in the documentation.

    python benchmarks/llama_memory.py [--layers 4] [--tasks 5] [--samples 32]

The experts are in files. Above the merged model the resident memory should stay below one more copy
of the model (the calibrated one), the samples' features, and two blocks' weights for each expert
and three more.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from random_models import BATCH, TOKENS, batches, load, write_models
from sides import finish, machine, start, table

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.results.cost import measure

MODEL = "llama-small"


def bound_of(model: Any, tasks: int, samples: int) -> float:
    """Return the bound in bytes."""
    width, inner = model.config.hidden_size, model.config.intermediate_size
    block = 4 * sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    features = 4 * 3 * tasks * samples * TOKENS * width  # calibrated, expert, next expert
    one_batch = 4 * 2 * BATCH * TOKENS * (6 * width + 3 * inner)  # in a block, on both sides
    return whole + 2 * block * (tasks + 3) + features + one_batch


def print_costs(options: argparse.Namespace) -> None:
    """Calibrate, and print the bound and the rise of the resident memory."""
    folder, names = Path(options.folder), [f"task_{index}" for index in range(options.tasks)]
    settings = FeatCalSettings(samples_per_task=options.samples, calibrate_norm=False)

    def run(model: Any, experts: dict[str, Any], base: Any, samples: int) -> None:
        inputs = {name: batches(MODEL, index, samples) for index, name in enumerate(names)}
        calibrate(model, base, experts, inputs, settings, progress=False)

    small = load(folder / "merged", MODEL, 1)  # first, so that lazily imported modules are resident
    run(small, dict.fromkeys(names, small), small, 1)
    merged = load(folder / "merged", MODEL, options.layers)
    sources = {name: SafetensorsExpert(folder / name) for name in names}
    before = psutil.Process().memory_info().rss
    with measure() as cost:
        run(merged, sources, SafetensorsExpert(folder / "base"), options.samples)
    assert cost.peak_rss_bytes is not None
    bound = bound_of(merged, options.tasks, options.samples)
    print(json.dumps({"bound": bound, "measured": cost.peak_rss_bytes - before}))


def main() -> None:
    """Print bound, measured memory, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"layers": 4, "tasks": 5, "samples": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        print_costs(options)
        return
    with TemporaryDirectory() as folder:
        write_models(Path(folder), MODEL, options.layers, options.tasks)
        costs = finish(start("--folder", folder))
    sizes = f"{options.layers} blocks, {options.tasks} experts, {options.samples} samples per task"
    print(f"{MODEL}, {sizes}. {machine()}\n")
    print(table({side: {"memory, MB": value / 1e6} for side, value in costs.items()}))


if __name__ == "__main__":
    main()
