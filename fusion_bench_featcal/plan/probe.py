"""Speed of this machine, measured on one product."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial

import torch
from torch.nn import functional

from fusion_bench_featcal.core.kernels import choose_kernel, with_kernel
from fusion_bench_featcal.settings import FeatCalSettings

EFFICIENCY = 0.55
"""Share of a single product's speed that whole calibrations reach: the rest is element by element.
benchmarks/plan.py found 0.4 to 0.65."""

Rate = Callable[[torch.dtype, int], float]
"""FLOP/s of products of numbers of a dtype, about so wide."""


def measured_rate(device: torch.device, settings: FeatCalSettings) -> Rate:
    """Speed of a device with the kernel that the calibration will choose."""
    return partial(probe, device, choose_kernel(settings.linear_kernel, device))


@cache
def probe(device: torch.device, kernel: str, dtype: torch.dtype, width: int) -> float:
    """FLOP/s of a linear layer, as whole calibrations reach them; measured once in a process.

    Of CPU time where there is one thread, else of wall-clock time. `kernel` multiplies float32
    matrices on a CPU.
    """
    if device.type == "mps" and dtype == torch.float64:
        dtype = torch.float32
    rows, width = 512, min(max(width, 64), 1024)
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(n, width, generator=generator).to(device, dtype) for n in (rows, width)
    )
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if one_thread else time.perf_counter
    seconds = []
    with torch.no_grad(), with_kernel(kernel, nullcontext)():
        while len(seconds) < 4 or (sum(seconds) < 0.02 and len(seconds) < 50):
            start = clock()
            functional.linear(left, right)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(max(clock() - start, 1e-9))
    return EFFICIENCY * 2 * rows * width**2 / min(seconds[1:])
