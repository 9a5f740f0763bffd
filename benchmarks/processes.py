"""Seconds and memory of two processes with one thread beside one process with two threads.

    python benchmarks/processes.py [--layers 2] [--tasks 8] [--samples 32] [--repeats 3]

Random models of ViT-B/32's shape are calibrated in turns. Processes communicate through gloo. Only
the calibration is measured. It includes making the inputs, and peaks include the program itself.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
from random_models import batches, load, write_models
from safetensors.torch import save
from sides import Costs, costs_of, finish, in_turns, machine, start, table

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.run.processes import TorchProcesses

MODEL = "vit-b-32"
SIDES = {"1 process x 2 threads": 1, "2 processes x 1 thread": 2}


def take_part(options: argparse.Namespace) -> None:
    """Calibrate as one of the processes, and print its costs."""
    folder, names = Path(options.folder), [f"task_{index}" for index in range(options.tasks)]
    store = dist.FileStore(options.store, options.size)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.size)
    processes, merged = TorchProcesses(), load(folder / "merged", MODEL, options.layers)
    inputs = {name: batches(MODEL, i, options.samples) for i, name in enumerate(names)}
    sources = {name: SafetensorsExpert(folder / name) for name in names}
    base, settings = (
        SafetensorsExpert(folder / "base"),
        FeatCalSettings(samples_per_task=options.samples),
    )
    processes.gather(None)  # both begin at the same time
    result, costs = costs_of(
        lambda: calibrate(
            merged, base, sources, inputs, settings, progress=False, processes=processes
        )
    )
    parameters = {name: tensor.contiguous() for name, tensor in result.model.named_parameters()}
    exchanged = processes.exchanged_bytes if options.size > 1 else 0
    costs["exchanged per block, MB"] = exchanged / 1e6 / options.layers
    print(json.dumps([costs, hashlib.sha256(save(parameters)).hexdigest()]))
    dist.destroy_process_group()


def measure(side: str, folder: str) -> Costs:
    """Return the costs of all processes of a side together."""
    size = SIDES[side]
    words = "--folder", folder, "--size", size, "--store", f"{folder}/store-{time.monotonic_ns()}"
    env = {"OMP_NUM_THREADS": str(2 // size)}
    running = [start(*words, "--rank", rank, env=env) for rank in range(size)]
    costs, digests = zip(*map(finish, running), strict=True)
    assert len(set(digests)) == 1, "the processes have different models"
    peaks = [each["peak memory, MB"] for each in costs]
    return {
        "wall, s": max(each["wall, s"] for each in costs),
        "CPU, s": sum(each["CPU, s"] for each in costs),
        "peak memory of a process, MB": max(peaks),
        "peak memory of all, MB": sum(peaks),
        "exchanged per block, MB": costs[0]["exchanged per block, MB"],
    }


def main() -> None:
    """Print a table of both sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"layers": 2, "tasks": 8, "samples": 32, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, kind in {"folder": str, "store": str, "rank": int, "size": int}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        take_part(options)
        return
    with TemporaryDirectory() as folder:
        write_models(Path(folder), MODEL, options.layers, options.tasks)
        costs = in_turns(SIDES, options.repeats, lambda side: measure(side, folder))
    sizes = f"{options.layers} blocks, {options.tasks} tasks, {options.samples} images per task"
    print(f"{MODEL}, {sizes}, turns: {options.repeats}. {machine()}\n\n{table(costs)}")


if __name__ == "__main__":
    main()
