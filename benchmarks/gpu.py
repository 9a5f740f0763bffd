"""Time, memory and energy of a calibration on a GPU, beside a straightforward one on the same GPU.

    python benchmarks/gpu.py vit-b-32 vit-l-14 llama-8b --out benchmarks/results/gpu.md

Every side runs twice in a process of its own, with random weights read from files, and the faster
turn counts. The straightforward implementation (straightforward.py) holds all experts on the GPU.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speed_models import PRESETS, Shape, load, write_models
from straightforward import calibrate_plainly
from transformers import __version__ as transformers_version

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.results.cost import measure

# The paper's shapes. Of the larger models some blocks run, because all blocks cost the same.
SIZES: dict[str, dict[str, Any]] = {
    "vit-b-32": {"layers": 12, "tasks": 8, "samples": 256},
    "vit-l-14": {"layers": 6, "tasks": 8, "samples": 256},
    "t5-base": {"layers": 12, "tasks": 8, "samples": 256},
    "llama-8b": {"layers": 2, "tasks": 5, "samples": 64, "length": 512},
}
LAYERS = {"vit-b-32": 12, "vit-l-14": 24, "t5-base": 12, "llama-8b": 32}
LIMIT = 240  # seconds of a side
NAMES = {
    "plain": "straightforward",
    "paper": "FeatCal",
    "plus": "FeatCal+",
}


def run(side: str, shape: Shape, folder: Path, data: dict[str, list[Any]]) -> Any:
    """Read the models of one side and calibrate. Return the model."""
    if side == "plain":
        names = sorted(data)
        with torch.device("cuda"):
            models = {n: load(shape, folder / n).cuda() for n in ("merged", "base", *names)}
            merged, base = models.pop("merged"), models.pop("base")
            on_gpu = {
                task: [{k: v.cuda() for k, v in batch.items()} for batch in batches]
                for task, batches in data.items()
            }
            calibrate_plainly(merged, base, models, on_gpu, shape.settings())
        return merged
    settings = shape.settings()
    if side == "plus":
        settings = FeatCalSettings.plus(
            samples_per_task=shape.samples, batch_size=settings.batch_size
        )
    experts = {task: SafetensorsExpert(folder / task) for task in data}
    base, merged = SafetensorsExpert(folder / "base"), load(shape, folder / "merged")
    return calibrate(merged, base, experts, data, settings, device="cuda", progress=False).model


def child(side: str, shape: Shape, folder: Path) -> None:
    """Run one side twice and print the cost of the faster turn as JSON."""
    torch.set_grad_enabled(False)
    torch.zeros(1, device="cuda")
    data = {path.name: list(shape.batches(path.name)) for path in folder.glob("task_*")}
    costs = []
    for _ in range(2):
        with measure() as cost:
            model = run(side, shape, folder, data)
        costs.append(cost.as_dict())
        state = {name: p.cpu().contiguous() for name, p in model.named_parameters()}
        del model
        torch.cuda.empty_cache()
    save_file(state, folder / f"{side}.safetensors")
    print(json.dumps(min(costs, key=lambda cost: cost["seconds"])))


def difference(folder: Path) -> float:
    """Return the largest relative difference of a parameter between FeatCal's two sides."""
    one, other = (load_file(folder / f"{side}.safetensors") for side in ("plain", "paper"))
    return max(float((one[n] - other[n]).norm() / one[n].norm()) for n in one)


def table(name: str, shape: Shape, sides: list[str]) -> str:
    """Run the sides one after another and return a Markdown section."""
    lines = [
        f"## {name}: {shape.layers} of {LAYERS[name]} blocks, {shape.tasks} tasks, "
        f"{shape.samples} samples per task",
        "",
        "| | seconds | GPU memory, GB | Wh |",
        "|---|--:|--:|--:|",
    ]
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        with torch.device("cuda"):
            write_models(shape, Path(folder))
        torch.cuda.empty_cache()
        costs = {side: _measured(side, name, Path(folder)) for side in sides}
        for side, cost in costs.items():
            memory = cost["peak_accelerator_bytes"] / 1e9
            energy = cost.get("gpu_energy_wh")
            energy = "-" if energy is None else f"{energy:.2f}"
            lines.append(f"| {NAMES[side]} | {cost['seconds']:.1f} | {memory:.2f} | {energy} |")
        if {"plain", "paper"} <= {*costs}:
            plain, ours = costs["plain"], costs["paper"]
            ratios = [plain[k] / ours[k] for k in ("seconds", "peak_accelerator_bytes")]
            lines.append(f"| **ratio** | **{ratios[0]:.2f}** | **{ratios[1]:.2f}** | |")
            lines += [
                "",
                f"Largest relative difference of a parameter: {difference(Path(folder)):.1e}.",
            ]
    return "\n".join(lines) + "\n"


def _measured(side: str, name: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, name, f"--side={side}", f"--folder={folder}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", choices=SIZES)
    parser.add_argument("--sides", nargs="+", choices=NAMES, default=[*NAMES])
    parser.add_argument("--out", type=Path, help="append the tables to this Markdown file")
    parser.add_argument("--side", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = {name: Shape(**(PRESETS[name] | SIZES[name])) for name in options.models}
    if options.side:
        child(options.side, *shapes.values(), options.folder)
        return
    for name, shape in shapes.items():
        gpu = torch.cuda.get_device_name()
        text = table(name, shape, options.sides) + (
            f"\n{gpu}, torch {torch.__version__}, transformers {transformers_version}; "
            f"{dataclasses.asdict(shape)}\n"
        )
        print(text, flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(f"\n{text}")


if __name__ == "__main__":
    main()
