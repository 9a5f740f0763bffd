"""How fast this machine is: measured in a second or two, by kind and size of the work."""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

Points = tuple[tuple[float, float], ...]
"""Pairs of a size and a rate, by rising size."""

_ROWS = 1024
_QUICK = 600.0
_QUICK_ENTRIES = 2**20
"""Sizes above these are left out of a quick measurement."""


@dataclass(frozen=True)
class Rates:
    """Rates of one device.

    Attributes:
        device: Its type.
        threads: Threads of the CPU.
        linear: Floating point operations a second of `X W'` in float32, by the geometric mean of
            the three sizes.
        low: The same in bfloat16.
        gram: The same of `X' X` in float32 that is added to a sum.
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
    linear: Points
    low: Points
    gram: Points
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
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> "Rates":
        """Rates that `write` wrote.

        Raises:
            ValueError: If the file holds something else.
        """
        try:
            values: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            for name, value in values.items():
                if isinstance(value, list):
                    values[name] = tuple((float(size), float(rate)) for size, rate in value)
            return cls(**values)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no rates of a machine: {error}") from error


def measure_rates(device: torch.device | str = "cpu", *, quick: bool = False) -> Rates:
    """Measure a device.

    Args:
        device: The device.
        quick: Whether a tenth of a second has to do: large sizes are left out.

    Returns:
        Its rates, of CPU time where there is one thread, else of wall-clock time.
    """
    device = torch.device(device)
    generator = torch.Generator().manual_seed(0)
    repeats = 1 if quick else 3

    def make(*shape: int, wide: bool = False) -> torch.Tensor:
        dtype = torch.float64 if wide and device.type != "mps" else torch.float32
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def rate(work: float, run: Callable[[], Any]) -> float:
        return work / _seconds(run, device, repeats)

    kinds: Mapping[str, tuple[tuple[int, ...], Callable[..., tuple[float, float]]]] = {
        "linear": ((64, 128, 256, 512, 1024), lambda d: _linear(d, make, rate)),
        "low": ((128, 512), lambda d: _linear(d, make, rate, torch.bfloat16)),
        "gram": ((64, 128, 256, 512, 1024), lambda d: _gram(d, make, rate)),
        "attention": ((16, 64, 256), lambda s: _attention(s, make, rate)),
        "wide": ((128, 512), lambda d: _wide(d, make, rate)),
        "factor": ((64, 256, 768), lambda d: _factor(d, make, rate, wide=False)),
        "factor_wide": ((64, 256, 768), lambda d: _factor(d, make, rate, wide=True)),
        "solve": ((64, 256, 768), lambda d: _solve(d, make, rate, wide=False)),
        "solve_wide": ((64, 256, 768), lambda d: _solve(d, make, rate, wide=True)),
        "moved": ((2**14, 2**17, 2**20, 2**21, 2**22, 2**23), lambda n: _moved(n, make, rate)),
        "costly": ((2**14, 2**17, 2**20, 2**22), lambda n: _costly(n, make, rate)),
    }
    measured: dict[str, Points] = {}
    for kind, (sizes, measure) in kinds.items():
        limit = _QUICK_ENTRIES if kind in ("moved", "costly") else _QUICK
        chosen = [size for size in sizes if not quick or size <= limit]
        measured[kind] = tuple(measure(size) for size in chosen)
    transfer = _transfer(device) if device.type == "cuda" else 0.0
    return Rates(device.type, torch.get_num_threads(), transfer=transfer, **measured)


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


def _linear(
    d: int, make: Any, rate: Any, dtype: torch.dtype = torch.float32
) -> tuple[float, float]:
    rows, weight, bias = (part.to(dtype) for part in (make(_ROWS // 2, d), make(d, d), make(d)))
    flops = 2 * len(rows) * d * d
    size = (len(rows) * d * d) ** (1 / 3)
    return size, rate(flops, lambda: functional.linear(rows, weight, bias))


def _gram(d: int, make: Any, rate: Any) -> tuple[float, float]:
    width = min(d, max(128, -(-d // 6)))
    rows, into = make(2 * _ROWS, d), make(width, d)
    size = (len(rows) * width * d) ** (1 / 3)
    return size, rate(2 * len(rows) * width * d, lambda: into.addmm_(rows[:, :width].T, rows))


def _attention(keys: int, make: Any, rate: Any) -> tuple[float, float]:
    heads, width = 12, 64
    parts = [make(4, heads, keys, width) for _ in range(3)]
    flops = 4 * 4 * heads * keys * keys * width
    return keys, rate(flops, lambda: functional.scaled_dot_product_attention(*parts))


def _wide(d: int, make: Any, rate: Any) -> tuple[float, float]:
    left, right = make(d, d, wide=True), make(d, d, wide=True)
    return d, rate(2 * d**3, lambda: left @ right)


def _system(d: int, make: Any, wide: bool) -> torch.Tensor:
    rows = make(d, d, wide=wide)
    return rows @ rows.T / d + torch.eye(d, dtype=rows.dtype, device=rows.device)


def _factor(d: int, make: Any, rate: Any, *, wide: bool) -> tuple[float, float]:
    system = _system(d, make, wide)
    return d, rate(d**3 / 3, lambda: torch.linalg.cholesky_ex(system))


def _solve(d: int, make: Any, rate: Any, *, wide: bool) -> tuple[float, float]:
    factor = torch.linalg.cholesky(_system(d, make, wide))
    right = make(d, d, wide=wide)
    return d, rate(2 * d**3, lambda: torch.cholesky_solve(right.T, factor))


def _moved(entries: int, make: Any, rate: Any) -> tuple[float, float]:
    left, right = make(entries), make(entries)
    return 12.0 * entries, rate(12 * entries, lambda: left + right)


def _costly(entries: int, make: Any, rate: Any) -> tuple[float, float]:
    values = make(entries)
    return 8.0 * entries, rate(8 * entries, lambda: torch.sigmoid(values))


def _transfer(device: torch.device) -> float:
    host = torch.empty(2**24, dtype=torch.uint8, pin_memory=True)
    return host.nbytes / _seconds(lambda: host.to(device, non_blocking=True), device, 3)
