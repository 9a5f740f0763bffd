"""Time, memory and energy of a calibration on a GPU, and of a direct one on the same GPU.

    python benchmarks/gpu.py vit-b-32 vit-l-14 llama-8b > benchmarks/results/gpu.md

Every side runs twice in a process of its own, with random weights read from files, and the faster
turn counts. The direct implementation (straightforward.py) holds all experts on the GPU.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from random_models import batches, load, write_models
from safetensors.torch import save_file
from sides import finish, largest_difference, machine, start, table
from straightforward import calibrate_plainly

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.results.cost import measure

# The paper's shapes: blocks that run, all blocks, tasks, samples per task, tokens. All blocks of a
# model cost the same.
SIZES = {
    "vit-b-32": (12, 12, 8, 256, 0),
    "vit-l-14": (6, 24, 8, 256, 0),
    "t5-base": (12, 12, 8, 256, 128),
    "llama-8b": (2, 32, 5, 64, 512),
}
SIDES = PLAIN, PAPER, PLUS = "straightforward", "FeatCal", "FeatCal+"
FIGURES = {
    "seconds": ("seconds", 1),
    "peak_accelerator_bytes": ("GPU memory, GB", 1e-9),
    "gpu_energy_wh": ("energy, Wh", 1),
}


def run(side: str, name: str, folder: Path, data: dict[str, list[Any]], device: str) -> Any:
    """Read the models of one side and calibrate. Return the model."""
    layers, _, _, samples, _ = SIZES[name]
    settings = FeatCalSettings(samples_per_task=samples, calibrate_norm=name.startswith("vit"))
    if side == PLAIN:
        models = {n: load(folder / n, name, layers).to(device) for n in ("merged", "base", *data)}
        merged, base = models.pop("merged"), models.pop("base")
        moved = {
            task: [{key: value.to(device) for key, value in batch.items()} for batch in part]
            for task, part in data.items()
        }
        calibrate_plainly(merged, base, models, moved, settings)
        return merged
    if side == PLUS:
        settings = FeatCalSettings.plus(samples_per_task=samples)
    experts = {task: SafetensorsExpert(folder / task) for task in data}
    base, merged = SafetensorsExpert(folder / "base"), load(folder / "merged", name, layers)
    return calibrate(merged, base, experts, data, settings, device=device, progress=False).model


def print_costs(side: str, name: str, folder: Path, device: str) -> None:
    """Run one side twice, store its parameters, and print the cost of the faster turn."""
    _, _, tasks, samples, length = SIZES[name]
    data = {f"task_{i}": list(batches(name, i, samples, length)) for i in range(tasks)}
    torch.zeros(1, device=device)
    costs: list[dict[str, float]] = []
    state: dict[str, torch.Tensor] = {}
    for _ in range(2):
        with measure() as cost:
            model = run(side, name, folder, data, device)
        costs.append(cost.as_dict())
        state = {n: p.detach().cpu().contiguous() for n, p in model.named_parameters()}
        del model
        torch.cuda.empty_cache()
    save_file(state, folder / f"{side}.safetensors")
    faster = min(costs, key=lambda each: each["seconds"])
    found = {key: label for key, label in FIGURES.items() if key in faster}
    print(json.dumps({label: faster[key] * unit for key, (label, unit) in found.items()}))


def main() -> None:
    """Print a section for each model named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=SIZES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print_costs(options.side, options.model, options.folder, options.device)
        return
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for name in options.models:
        layers, all_layers, tasks, samples, _ = SIZES[name]
        with TemporaryDirectory(dir=memory) as folder:
            with torch.device(options.device):
                write_models(Path(folder), name, layers, tasks)
            torch.cuda.empty_cache()
            words = "--model", name, "--folder", folder
            costs = {side: finish(start("--side", side, *words)) for side in SIDES}
            difference = largest_difference(Path(folder), SIDES)
        sizes = f"{layers} of {all_layers} blocks, {tasks} tasks, {samples} samples per task"
        print(f"## {name}: {sizes}\n\n{table(costs)}\n")
        print(f"{difference}. {machine()}\n", flush=True)


if __name__ == "__main__":
    main()
