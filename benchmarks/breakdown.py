"""Where both sides' CPU seconds go, and what their arithmetic alone would take.

    python benchmarks/breakdown.py --model vit-b-32 --samples 32 [--out FILE]

Runs the straightforward implementation and the engine once each, in turn, counts the FLOPs of every
product that they make and the CPU seconds of every operation of torch. FLOPs at the measured GEMM
rate are each side's lower bound; the ratio of FLOPs is the most that leaving out arithmetic can
gain with one GEMM.
"""

import argparse
import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from engine_speed import SIDES, prepare, publish, run_engine, run_plain
from speed_models import Shape
from straightforward import gemm_rate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PHASES = ("passes", "sums", "solves", "reading", "rest")
TEXTS = {
    "passes": "forward passes",
    "sums": "sums over rows",
    "solves": "products `W_i C_i`, sums over tasks, solves",
    "reading": "reading weights",
    "rest": "torch's operations besides",
    "python": "outside torch",
}


def flops_of(name: str, args: tuple[Any, ...], result: Any) -> float:
    """FLOPs of one operation; 0 for what multiplies no matrices."""
    if name in ("mm", "addmm", "addmm_", "_linear_pointwise"):
        factors = args[1:3] if name.startswith("addmm") else args[:2]
        width = factors[0].shape[-1]
        return 2.0 * width * (args[0] if name == "addmm_" else result).numel()
    if name == "bmm":
        return 2.0 * args[0].shape[-1] * result.numel()
    if name == "convolution":
        return 2.0 * result.numel() * args[1][0].numel()
    if name.startswith("_scaled_dot_product"):
        query, key = args[:2]
        return 4.0 * query.numel() * key.shape[-2]
    width = args[0].shape[-1] if args and isinstance(args[0], Tensor) and args[0].ndim else 0
    if name == "linalg_cholesky_ex":
        return width**3 / 3
    if name == "_linalg_solve_ex":  # LU
        return 2 * width**3 / 3 + 2.0 * args[1].numel() * width
    return float(args[1].numel() * width) if name == "linalg_solve_triangular" else 0.0


def phase_of(frame: FrameType | None) -> str:
    """Which phase the code that called an operation belongs to."""
    found = "rest"
    while frame is not None:
        file, function = Path(frame.f_code.co_filename), frame.f_code.co_name
        if function in ("solve_linear", "solve_norm", "solve_together", "fold", "means"):
            return "solves"
        if file.name == "moments.py":
            return "sums"
        if function == "add" and file.name == "block.py":
            return "solves"
        if found == "rest" and (file.parent.name == "families" or "modeling_" in file.name):
            found = "passes"
        elif found == "rest" and (file.parent.name == "experts" or function == "load"):
            found = "reading"
        frame = frame.f_back
    return found


class Counting(TorchDispatchMode):
    """Adds up FLOPs and CPU seconds of all operations, by phase."""

    def __init__(self) -> None:
        """Start with nothing counted."""
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        start = time.thread_time()
        result = func(*args, **(kwargs or {}))
        taken = time.thread_time() - start
        phase = phase_of(sys._getframe(1))
        self.seconds[phase] += taken
        self.flops[phase] += flops_of(func._schema.name.split("::")[1], args, result)
        return result


@torch.no_grad()
def counted(side: str, shape: Shape, folder: Path) -> Counting:
    """Run one side under the count; what is outside torch is counted as `python`."""
    tasks = sorted(path.name for path in folder.glob("task_*"))
    start = time.thread_time()
    with Counting() as counting:
        if side == "plain":
            run_plain(shape, folder, tasks)
        else:
            run_engine(shape, folder, tasks, {})
    taken = time.thread_time() - start
    counting.seconds["python"] = max(taken - sum(counting.seconds.values()), 0.0)
    return counting


def table(sides: dict[str, Counting], rate: float) -> str:
    """The phases of both sides in Markdown, and their bounds."""
    lines = [
        "| | straightforward: TFLOP | CPU s | GFLOP/s | engine: TFLOP | CPU s | GFLOP/s |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    totals = []
    for side in sides.values():
        totals.append((sum(side.flops.values()), sum(side.seconds.values())))
    for phase in (*PHASES, "python"):
        pairs = [(side.flops[phase], side.seconds[phase]) for side in sides.values()]
        lines.append(f"| {TEXTS[phase]} | " + " | ".join(_cells(*pair) for pair in pairs) + " |")
    lines.append("| **all** | " + " | ".join(_cells(*total) for total in totals) + " |")
    bounds = [flops / rate for flops, _ in totals]
    shares = [100 * bound / seconds for bound, (_, seconds) in zip(bounds, totals, strict=True)]
    lines.append(
        f"\nAt the measured GEMM rate, {rate / 1e9:.0f} GFLOP per CPU second, the arithmetic alone "
        f"takes {bounds[0]:.1f} and {bounds[1]:.1f} CPU seconds: {shares[0]:.0f} % and "
        f"{shares[1]:.0f} % of what the sides take. Ratio of the FLOPs "
        f"{totals[0][0] / totals[1][0]:.2f}, of the seconds {totals[0][1] / totals[1][1]:.2f}."
    )
    return "\n".join(lines)


def _cells(flops: float, seconds: float) -> str:
    if not flops:
        return f"| {seconds:.1f} |"
    return f"{flops / 1e12:.2f} | {seconds:.1f} | {flops / seconds / 1e9:.0f}"


def main() -> None:
    """Count both sides; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    Shape.add_arguments(parser)
    parser.add_argument("--out", type=Path, help="also append the table to this Markdown file")
    options = parser.parse_args()
    shape = Shape.of(options)
    rate = gemm_rate(shape)
    with TemporaryDirectory() as folder:
        prepare(shape, Path(folder))
        sides = {side: counted(side, shape, Path(folder)) for side in SIDES}
    rate = max(rate, gemm_rate(shape))
    publish(
        f"{shape}; {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} "
        f"threads, torch {torch.__version__}\n\n{table(sides, rate)}\n",
        options.out,
    )


if __name__ == "__main__":
    main()
