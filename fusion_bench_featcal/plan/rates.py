"""How fast this machine is: measured in a second or two, by kind and size of the work."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusion_bench_featcal.core.blocked import Product
from fusion_bench_featcal.core.cholesky import factor_of, triangular_solves
from fusion_bench_featcal.engine.block import are_products_faster
from fusion_bench_featcal.engine.kernels import choose_kernel, using_kernel, with_kernel
from fusion_bench_featcal.engine.products import (
    COLUMN_BLOCKS,
    SMALL,
    add_lower_gram,
    add_product,
    columns_of,
    times_transposed,
)
from fusion_bench_featcal.files import ReportError, plain, read_json, sealed_json

Points = tuple[tuple[float, float], ...]
"""Pairs of a size and a rate, by rising size."""

_ROWS = 1024
"""Rows of the operands."""

_ALWAYS_NEW = 2**25
"""From so many bytes on the C library asks the system for every tensor's memory."""


@dataclass(frozen=True)
class Rates:
    """Rates of one device.

    Attributes:
        device: Its type.
        threads: Threads of the CPU.
        kernel: What multiplies float32 matrices (`method.linear_kernel`).
        linear: Floating point operations a second of `X W'` in float32, by the geometric mean of
            the three sizes.
        low: The same in bfloat16.
        gram: The same of half grams `X' X` that are added to a sum, in float32.
        cross: The same of whole products `X' Y` that are.
        attention: Of fused attention, by number of keys.
        wide: Of products in float64.
        factor: Of Cholesky factorisations in float32, by width.
        factor_wide: The same in float64.
        solve: Of solves with a factor in float32, by width.
        solve_wide: The same in float64.
        moved: Bytes a second of sums of two tensors, by their bytes.
        costly: Bytes a second of a function of every entry, by their bytes.
        transfer: Bytes a second from and to pinned host memory; 0 for a CPU.
    """

    device: str
    threads: int
    kernel: str
    linear: Points
    low: Points
    gram: Points
    cross: Points
    attention: Points
    wide: Points
    factor: Points
    factor_wide: Points
    solve: Points
    solve_wide: Points
    moved: Points
    costly: Points
    transfer: float = 0.0

    def at(self, kind: str, size: float) -> float:
        """A rate, between the measured sizes on a straight line of logarithms."""
        points: Points = getattr(self, kind)
        size = min(max(size, points[0][0]), points[-1][0])
        for (low, slow), (high, fast) in pairwise(points):
            if size <= high:
                share = math.log(size / low) / math.log(high / low)
                return math.exp(math.log(slow) * (1 - share) + math.log(fast) * share)
        return points[-1][1]

    def write(self, path: str | Path) -> None:
        """Write the rates as JSON."""
        Path(path).write_text(sealed_json(plain(asdict(self), "rates")), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> "Rates":
        """Rates that `write` wrote.

        Raises:
            ValueError: If the file holds something else.
        """
        try:
            values: dict[str, Any] = read_json(Path(path))
            for name, value in values.items():
                if isinstance(value, list):
                    values[name] = tuple((float(size), float(rate)) for size, rate in value)
            return cls(**values)
        except (ReportError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no rates of a machine: {error}") from error


def measure_rates(
    device: torch.device | str = "cpu", *, linear_kernel: str = "auto", quick: bool = False
) -> Rates:
    """Measure a device.

    Args:
        device: The device.
        linear_kernel: The setting.
        quick: Whether a tenth of a second has to do: large sizes are left out.

    Returns:
        Its rates, of CPU time where there is one thread, else of wall-clock time.
    """
    device = torch.device(device)
    kernel = choose_kernel(linear_kernel, device)
    with torch.no_grad(), using_kernel(kernel), with_kernel(kernel, nullcontext)():
        measured = {
            kind: tuple(measure(size, _Bench(device, 1 if quick else 3)) for size in chosen)
            for kind, (measure, sizes) in _KINDS.items()
            if (chosen := [s for s in sizes if not quick or s <= _limit(kind)])
        }
    transfer = _transfer(device) if device.type == "cuda" else 0.0
    return Rates(device.type, torch.get_num_threads(), kernel, transfer=transfer, **measured)


def _limit(kind: str) -> int:
    """The largest size of a quick measurement."""
    return 2**20 if kind in ("moved", "costly") else 600


@dataclass(frozen=True)
class _Bench:
    """Makes operands on a device, and measures what is done with them."""

    device: torch.device
    repeats: int

    def make(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        dtype = torch.float32 if self.device.type == "mps" else dtype
        return torch.randn(*shape, generator=generator).to(self.device, dtype)

    def rate(self, work: float, run: Callable[[], Any]) -> float:
        return work / _seconds(run, self.device, self.repeats)


def _seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Shortest time of a few runs, after one that warms up."""
    one = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if one else time.perf_counter

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    wait()
    best, spent, done = math.inf, 0.0, 0
    while done < repeats or (spent < 2e-3 and done < 200):
        start = clock()
        run()
        wait()
        took = max(clock() - start, 1e-9)
        best, spent, done = min(best, took), spent + took, done + 1
    return best


def gram_flops(rows: float, width: int) -> float:
    """Operations of a half gram: its strips reach over the diagonal."""
    strip = max(SMALL, -(-width // COLUMN_BLOCKS))
    stops = [min(start + strip, width) for start in range(0, width, strip)]
    return 2.0 * rows * sum((stop - start) * stop for start, stop in pairwise([0, *stops]))


def _linear(d: int, bench: _Bench, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    shapes = ((_ROWS // 2, d), (d, d), (d,))
    rows, weight, bias = (bench.make(*shape, dtype=dtype) for shape in shapes)
    size = (len(rows) * d * d) ** (1 / 3)
    return size, bench.rate(2 * len(rows) * d * d, lambda: functional.linear(rows, weight, bias))


def _low(d: int, bench: _Bench) -> tuple[float, float]:
    return _linear(d, bench, torch.bfloat16)


def _wide(d: int, bench: _Bench) -> tuple[float, float]:
    return _linear(d, bench, torch.float64)


def _gram(d: int, bench: _Bench) -> tuple[float, float]:
    rows, into = bench.make(_ROWS, d), bench.make(d, d)
    size = (len(rows) * d * d) ** (1 / 3)
    return size, bench.rate(
        gram_flops(len(rows), d), lambda: add_lower_gram(into, columns_of(rows))
    )


def _cross(d: int, bench: _Bench) -> tuple[float, float]:
    left, right, into = bench.make(_ROWS, d), bench.make(_ROWS, d), bench.make(d, d)
    size = (len(left) * d * d) ** (1 / 3)
    flops = 2 * len(left) * d * d
    return size, bench.rate(flops, lambda: add_product(into, columns_of(left), columns_of(right)))


def _attention(keys: int, bench: _Bench) -> tuple[float, float]:
    heads, width = 12, 64
    q, k, v = (bench.make(4, heads, keys, width) for _ in range(3))
    flops = 4 * 4 * heads * keys * keys * width
    return keys, bench.rate(flops, lambda: functional.scaled_dot_product_attention(q, k, v))


def _system(d: int, bench: _Bench, dtype: torch.dtype) -> Tensor:
    rows = bench.make(d, d, dtype=dtype)
    return rows @ rows.T / d + torch.eye(d, dtype=rows.dtype, device=rows.device)


def _product_for(like: Tensor) -> Product | None:
    """What the engine solves systems like this one by; None: LAPACK."""
    return times_transposed if are_products_faster(like) else None


def _factor(d: int, bench: _Bench, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    system = _system(d, bench, dtype)
    return d, bench.rate(d**3 / 3, lambda: factor_of(system, _product_for(system)))


def _factor_wide(d: int, bench: _Bench) -> tuple[float, float]:
    return _factor(d, bench, torch.float64)


def _solve(d: int, bench: _Bench, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    factor = torch.linalg.cholesky(_system(d, bench, dtype))
    right = bench.make(d, d, dtype=dtype)
    times = _product_for(factor)
    return d, bench.rate(2 * d**3, lambda: triangular_solves(right, factor, times))


def _solve_wide(d: int, bench: _Bench) -> tuple[float, float]:
    return _solve(d, bench, torch.float64)


def _moved(entries: int, bench: _Bench) -> tuple[float, float]:
    left, right = bench.make(entries), bench.make(entries)
    # Memory that the system hands out anew for every large tensor costs more than its use.
    into = None if left.nbytes >= _ALWAYS_NEW else torch.empty_like(left)
    return 12.0 * entries, bench.rate(12 * entries, lambda: torch.add(left, right, out=into))


def _costly(entries: int, bench: _Bench) -> tuple[float, float]:
    values = bench.make(entries)
    return 8.0 * entries, bench.rate(8 * entries, lambda: torch.sigmoid(values))


def _transfer(device: torch.device) -> float:
    host = torch.empty(2**24, dtype=torch.uint8, pin_memory=True)
    return host.nbytes / _seconds(lambda: host.to(device, non_blocking=True), device, 3)


_WIDTHS, _FEW_WIDTHS = (64, 128, 256, 512, 1024), (64, 256, 768)
_KINDS: Mapping[str, tuple[Callable[[int, _Bench], tuple[float, float]], Sequence[int]]] = {
    "linear": (_linear, _WIDTHS),
    "low": (_low, (128, 512)),
    "wide": (_wide, (128, 512)),
    "gram": (_gram, _WIDTHS),
    "cross": (_cross, _WIDTHS),
    "attention": (_attention, (16, 64, 256)),
    "factor": (_factor, _FEW_WIDTHS),
    "factor_wide": (_factor_wide, _FEW_WIDTHS),
    "solve": (_solve, _FEW_WIDTHS),
    "solve_wide": (_solve_wide, _FEW_WIDTHS),
    "moved": (_moved, (2**14, 2**17, 2**20, 2**22, 2**23)),
    "costly": (_costly, (2**14, 2**17, 2**20, 2**22)),
}
"""What is measured, at which sizes."""
