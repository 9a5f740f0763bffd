"""What does each of the engine's steps save? All of them on, and each one off in turn.

    python benchmarks/on_off.py --layers 2 --samples 32 --repeats 3

Every variant runs in a process of its own on the same stored models, in turns; the least CPU
seconds of several turns and the largest peak of resident memory are compared with those of the
whole engine, and the calibrated parameters too: a step may change rounding and nothing else.
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from engine_speed import largest_difference, prepare, publish
from safetensors.torch import save_file
from speed_models import Shape, load
from torch import Tensor

from fusion_bench_featcal import SafetensorsExpert, calibrate
from fusion_bench_featcal.core import LinearSums, cholesky, products, solve
from fusion_bench_featcal.core.moments import frobenius_norm
from fusion_bench_featcal.engine import task_sums
from fusion_bench_featcal.families import resolve_family


def no_sharing() -> None:
    """Every module has its own statistic and factor."""
    original = task_sums.TaskSums._weighs_tokens
    numbers: dict[str, int] = {}

    def unlike(self: Any, site: Any) -> Any:  # part of what modules must have alike to share
        return original(self, site) or -1 - numbers.setdefault(site.name, len(numbers))

    def weights(self: Any, site: Any, x: Tensor, valid: Any) -> Tensor | None:
        return None if valid is None else valid.weights

    task_sums.TaskSums._weighs_tokens = unlike  # type: ignore[method-assign]
    task_sums.TaskSums._row_weights = weights  # type: ignore[method-assign]


def whole_grams() -> None:
    """Grams are formed whole."""
    products._strips = lambda width: [(0, width)]  # type: ignore[assignment]


def cross_moments() -> None:
    """Cross moments are formed whatever the number of outputs."""
    original = LinearSums.__init__

    def formed(self: Any, like: Tensor, *, expert_weights: Any = None, **options: Any) -> None:
        original(self, like, **options)

    LinearSums.__init__ = formed  # type: ignore[method-assign]


def double_solves() -> None:
    """Systems are solved in float64."""
    solve.SINGLE_LAMBDA = float("inf")


def whole_residuals() -> None:
    """The residual is computed from the whole product."""

    def residual(weight: Tensor, system: Tensor, right: Tensor) -> Tensor:
        return frobenius_norm(weight @ system - right) / frobenius_norm(right)

    cholesky.relative_residual = residual  # type: ignore[assignment]


def nothing() -> None:
    """Settings tell the difference."""


PATCHES: dict[str, tuple[str, Callable[[], None]]] = {
    "all": ("everything on", nothing),
    "sharing": ("no shared statistics", no_sharing),
    "grams": ("whole grams", whole_grams),
    "cross": ("cross moments always", cross_moments),
    "solves": ("float64 solves", double_solves),
    "residuals": ("whole residuals", whole_residuals),
    "ends": ("passes run to their end", nothing),
    "streaming": ("experts whole in memory", nothing),
    "in_place": ("merged model kept", nothing),
    "onednn": ("oneDNN in place of MKL", nothing),
    "drift": ("drift logged", nothing),
}


def child(variant: str, shape: Shape, folder: Path) -> None:
    """Calibrate with one step off; print what it took as JSON."""
    PATCHES[variant][1]()
    tasks = sorted(path.name for path in folder.glob("task_*"))
    merged = load(shape, folder / "merged")
    family: Any = resolve_family("auto", merged)
    settings = shape.settings(
        linear_kernel="onednn" if variant == "onednn" else "torch", log_drift=variant == "drift"
    )
    data = {task: shape.batches(task) for task in tasks}
    start = time.process_time()
    experts: dict[str, Any] = {task: SafetensorsExpert(folder / task) for task in tasks}
    if variant == "streaming":
        experts = {task: load(shape, folder / task) for task in tasks}
    result = calibrate(
        merged,
        SafetensorsExpert(folder / "base"),
        experts,
        data,
        settings,
        dataclasses.replace(family, same_calls=variant != "ends"),
        progress=False,
        in_place=variant != "in_place",
    )
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    state = {name: p.contiguous() for name, p in result.model.named_parameters()}
    save_file(state, folder / f"{variant}.safetensors")
    print(json.dumps({"cpu": seconds, "peak": peak}))


def table(turns: dict[str, list[dict[str, float]]], folder: Path) -> str:
    """All variants in Markdown."""
    lines = [
        "| | CPU seconds | ratio | peak RSS, GB | largest difference |",
        "|---|--:|--:|--:|--:|",
    ]
    least = {name: min(turn["cpu"] for turn in found) for name, found in turns.items()}
    for name, found in turns.items():
        peak = max(turn["peak"] for turn in found) / 1e9
        lines.append(
            f"| {PATCHES[name][0]} | {least[name]:.1f} | {least[name] / least['all']:.2f} | "
            f"{peak:.2f} | {largest_difference(folder, ('all', name))[0]:.0e} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Let the variants take turns; print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    Shape.add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each variant")
    parser.add_argument("--variants", nargs="*", default=list(PATCHES), choices=PATCHES)
    parser.add_argument("--out", type=Path, help="also append the table to this Markdown file")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = Shape.of(options)
    if options.variant:
        child(options.variant, shape, options.folder)
        return
    names = ["all", *(name for name in options.variants if name != "all")]
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with TemporaryDirectory() as place:
        folder = Path(place)
        prepare(shape, folder)
        for _ in range(options.repeats):
            for name in names:
                command = [sys.executable, __file__, f"--variant={name}", f"--folder={folder}"]
                done = subprocess.run(
                    [*command, *shape.arguments()], check=True, stdout=subprocess.PIPE, text=True
                )
                turns[name].append(json.loads(done.stdout.splitlines()[-1]))
        report = (
            f"{shape}; {platform.machine()}, {os.cpu_count()} cores, "
            f"{torch.get_num_threads()} threads, torch {torch.__version__}; least of "
            f"{options.repeats}; a ratio above 1 is what the step saves\n\n{table(turns, folder)}\n"
        )
    publish(report, options.out)


if __name__ == "__main__":
    main()
