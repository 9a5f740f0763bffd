"""Compare two processes with one process of as many threads: gain and costs.

    python benchmarks/processes.py [--blocks 2] [--tasks 8] [--samples 32] [--repeat 3]

Random models of ViT-B/32's shape, cut to a few blocks, are written to a temporary folder and
calibrated in turn by one process with two threads and by two processes with one thread each, joined
by gloo. Only the calibration is timed, without the inputs, which are made on the way. The fastest
of the repetitions counts. Peak memory includes the program itself. Needs about 1 GB of disk.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.results.cost import measure
from fusion_bench_featcal.run.processes import TorchProcesses

BATCH = 16
THREADS = 2
MB = 1e6


def tasks_of(options: argparse.Namespace) -> list[str]:
    """Return the names of the tasks."""
    return [f"task_{index}" for index in range(options.tasks)]


def write_models(folder: Path, options: argparse.Namespace) -> None:
    """Save a base, an expert for each task and their task arithmetic."""
    torch.manual_seed(0)
    config = CLIPVisionConfig(patch_size=32, num_hidden_layers=options.blocks)
    model = CLIPVisionModel(config)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    merged = {name: value.clone() for name, value in base.items()}
    model.save_pretrained(folder / "base")
    for task in tasks_of(options):
        with torch.no_grad():
            for name, value in model.named_parameters():
                step = 0.01 * torch.randn_like(value)
                value.copy_(base[name] + step)
                merged[name] += 0.3 * step
        model.save_pretrained(folder / task)
    model.load_state_dict(merged)
    model.save_pretrained(folder / "merged")


def batches(
    task: int, options: argparse.Namespace, taken: list[float]
) -> Iterator[dict[str, Tensor]]:
    """Yield random pictures, and record the time of creating them."""
    generator = torch.Generator().manual_seed(task)
    for start in range(0, options.samples, BATCH):
        size, began = min(BATCH, options.samples - start), time.perf_counter()
        pixels = torch.randn(size, 3, 224, 224, generator=generator)
        taken.append(time.perf_counter() - began)
        yield {"pixel_values": pixels}


def take_part(options: argparse.Namespace) -> None:
    """Calibrate as one of the processes, and print its costs."""
    folder, rank, size = Path(options.folder), options.rank, options.size
    store = dist.FileStore(f"{folder}/{options.store}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    processes = TorchProcesses()
    merged = CLIPVisionModel.from_pretrained(folder / "merged")
    settings = FeatCalSettings(samples_per_task=options.samples, batch_size=BATCH)
    names, making = tasks_of(options), []
    processes.gather(None)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with measure() as cost:
        result = calibrate(
            merged,
            SafetensorsExpert(folder / "base"),
            {task: SafetensorsExpert(folder / task) for task in names},
            {task: batches(index, options, making) for index, task in enumerate(names)},
            settings,
            progress=False,
            processes=processes,
        )
    after = resource.getrusage(resource.RUSAGE_SELF)
    state = {name: value.contiguous() for name, value in result.model.state_dict().items()}
    if rank == 0:
        save_file(state, folder / f"result-{size}.safetensors")
    digest = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    costs = {
        "wall": cost.seconds - sum(making),
        "cpu": cpu - sum(making),
        "peak": cost.peak_rss_bytes,
        "exchanged": processes.exchanged_bytes,
        "digest": digest.hexdigest(),
    }
    print(json.dumps(costs))
    dist.destroy_process_group()


def together(folder: str, size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the costs of each of some processes, by rank."""
    common = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--size", str(size)]
    common += ["--store", f"store-{size}-{time.monotonic_ns()}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS // size)}
    running = [
        subprocess.Popen(
            [*common, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=3600)[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("a process failed, see above")
    return [json.loads(text.splitlines()[-1]) for text in outputs]


def distance(folder: str) -> float:
    """Return the largest relative distance of a parameter between the two models."""
    one, two = (load_file(f"{folder}/result-{size}.safetensors") for size in (1, 2))
    gaps = {
        n: (two[n].double() - one[n].double()).norm() for n in one if one[n].is_floating_point()
    }
    return max(float(gap / one[name].double().norm()) for name, gap in gaps.items())


def print_table(runs: list[Any], gap: float, options: argparse.Namespace) -> None:
    """Print both sides and their ratios, from the fastest run of each."""
    one, two = (
        min((run[side] for run in runs), key=lambda run: max(part["wall"] for part in run))
        for side in (0, 1)
    )
    is_equal = all(len({part["digest"] for part in run[1]}) == 1 for run in runs)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, gloo;")
    print(
        f"ViT-B/32 shape, {options.blocks} blocks, {options.tasks} tasks, {options.samples} ",
        end="",
    )
    print(f"pictures each; fastest of {options.repeat}\n")
    print("| | 1 process x 2 threads | 2 processes x 1 thread | ratio |")
    print("|---|--:|--:|--:|")
    for label, name, pick, unit in (
        ("wall, s", "wall", max, 1),
        ("CPU of all processes, s", "cpu", sum, 1),
        ("peak memory of a process, MB", "peak", max, MB),
        ("peak memory of all processes, MB", "peak", sum, MB),
    ):
        single, double = (pick(part[name] for part in run) / unit for run in (one, two))
        print(f"| {label} | {single:.1f} | {double:.1f} | {double / single:.2f} |")
    sent = max(part["exchanged"] for part in two) / MB / options.blocks
    print(f"| exchanged by a process for a block, MB | 0 | {sent:.1f} | |")
    print(f"\nBoth processes hold the same bits: {'yes' if is_equal else 'NO'}; ", end="")
    print(f"largest relative distance of a parameter from one process's: {gap:.1e}")


def main() -> None:
    """Run both sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"blocks": 2, "tasks": 8, "samples": 32, "repeat": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        take_part(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), options)
        runs = [
            (together(folder, 1, options), together(folder, 2, options))
            for _ in range(options.repeat)
        ]
        gap = distance(folder)
    print_table(runs, gap, options)


if __name__ == "__main__":
    main()
