"""Seconds and memory of the package beside a direct implementation of Algorithm 1.

    OMP_NUM_THREADS=1 python benchmarks/engine_speed.py [--model vit-b-32] [--layers 2]
    python benchmarks/engine_speed.py --against ../earlier   # beside an earlier version's checkout

Sides are calibrated in turns, from the same random models in files and the same inputs. Figures
are the least seconds and the largest peak of the turns, including reading the models. On a GPU the
number of operations bounds small models: `operations.py` counts them.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from random_models import WIDTHS, batches, load, write_models
from safetensors.torch import save_file
from sides import Costs, costs_of, finish, in_turns, largest_difference, machine, start, table
from straightforward import calibrate_plainly

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate

PLAIN, PAPER, PLUS = "straightforward", "paper", "FeatCal+"
EARLIER = {f"earlier {side}": side for side in (PAPER, PLUS)}


def calibrated(side: str, options: argparse.Namespace) -> Any:
    """Return the model that one side calibrates."""
    folder, sizes = Path(options.folder), (options.model, options.layers)
    names = [f"task_{index}" for index in range(options.tasks)]
    inputs = {
        name: list(batches(options.model, i, options.samples)) for i, name in enumerate(names)
    }
    has_layer_norms = options.model.startswith("vit")
    settings = FeatCalSettings(samples_per_task=options.samples, calibrate_norm=has_layer_norms)
    merged = load(folder / "merged", *sizes)
    if side == PLAIN:
        base, *experts = (load(folder / name, *sizes) for name in ["base", *names])
        calibrate_plainly(merged, base, dict(zip(names, experts, strict=True)), inputs, settings)
        return merged
    if EARLIER.get(side, side) == PLUS:
        settings = FeatCalSettings.plus(samples_per_task=options.samples, augment="none")
    sources = {name: SafetensorsExpert(folder / name) for name in names}
    base = SafetensorsExpert(folder / "base")
    return calibrate(merged, base, sources, inputs, settings, progress=False).model


def print_costs(options: argparse.Namespace) -> None:
    """Measure one side, store its parameters, and print its costs."""
    model, costs = costs_of(lambda: calibrated(options.side, options))
    tensors = {name: parameter.contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, Path(options.folder, f"{options.side}.safetensors"))
    print(json.dumps(costs))


def main() -> None:
    """Print a table of all sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=WIDTHS, default="vit-b-32")
    for name, value in {"layers": 2, "tasks": 8, "samples": 32, "repeats": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--against", metavar="CHECKOUT", help="in place of the direct side")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print_costs(options)
        return
    with TemporaryDirectory() as folder:
        write_models(Path(folder), options.model, options.layers, options.tasks)

        def measure(side: str) -> Costs:
            env = {"PYTHONPATH": options.against} if side in EARLIER else {}
            return finish(start("--side", side, "--folder", folder, env=env))

        sizes = f"{options.layers} blocks, {options.tasks} tasks, {options.samples} samples"
        print(f"{options.model}, {sizes} per task, turns: {options.repeats}. {machine()}")
        for sides in EARLIER.items() if options.against else [(PLAIN, PAPER, PLUS)]:
            costs = in_turns(sides, options.repeats, measure)
            print(f"\n{table(costs)}\n\n{largest_difference(Path(folder), sides)}", flush=True)


if __name__ == "__main__":
    main()
