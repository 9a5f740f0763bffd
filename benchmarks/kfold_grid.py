"""Held-out solutions for a grid of lambdas: Cholesky factors against an eigendecomposition.

    python benchmarks/kfold_grid.py

For the training system of one fold and its right sides, as `core/ridge.py` has them: one factor for
each lambda of the whole grid (float32 from 1e-2 on, float64 below), those of the lambdas alone that
a search from the middle tries, and one eigendecomposition that serves all lambdas, in float64 and
in float32. Least CPU seconds of several, as ratios to the whole grid's.
"""

import platform
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusion_bench_featcal.core.ridge import GRID
from fusion_bench_featcal.core.solve import PROBES, SINGLE_RIDGE, shifted

WIDTHS = (192, 768, 1536)
SEARCH = (1e-3, 1e-2, 1e-1, 1.0)
REPEATS = 7


def problem(width: int) -> tuple[Tensor, Tensor]:
    """Second moments with a spectrum as features have, and right sides, float64."""
    generator = torch.Generator().manual_seed(width)
    spread = torch.logspace(0, -3, width, dtype=torch.float64)
    rows = torch.randn(4 * width, width, generator=generator, dtype=torch.float64) * spread
    right = torch.randn(PROBES, width, generator=generator, dtype=torch.float64)
    gram = rows.T @ rows / len(rows)
    return gram / gram.diagonal().mean(), right @ gram


def by_factors(gram: Tensor, right: Tensor, lambdas: Sequence[float]) -> list[Tensor]:
    """Solutions from a Cholesky factor for each lambda."""
    solutions = []
    for ridge in lambdas:
        dtype = torch.float32 if ridge >= SINGLE_RIDGE else torch.float64
        lower, _ = torch.linalg.cholesky_ex(shifted(gram, ridge, dtype))
        solutions.append(torch.cholesky_solve(right.mT.to(dtype), lower).mT.double())
    return solutions


def by_eigenvectors(gram: Tensor, right: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Solutions from one eigendecomposition."""
    values, vectors = torch.linalg.eigh(gram.to(dtype))
    turned = right.to(dtype) @ vectors
    return [((turned / (values + ridge)) @ vectors.T).double() for ridge in GRID]


def least(work: Callable[[], object]) -> float:
    """Least CPU seconds of several."""
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def main() -> None:
    """Print a Markdown table."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, {platform.machine()}\n")
    print(
        "| width | grid by factors (ms) | lambdas of a search | eigh, float64 | eigh, float32 | "
        "least lambda's error, factors / eigh float64 / float32 |\n|--:|--:|--:|--:|--:|---|"
    )
    for width in WIDTHS:
        gram, right = problem(width)
        ways: list[Callable[[], list[Tensor]]] = [
            lambda: by_factors(gram, right, GRID),  # noqa: B023
            lambda: by_factors(gram, right, SEARCH),  # noqa: B023
            lambda: by_eigenvectors(gram, right, torch.float64),  # noqa: B023
            lambda: by_eigenvectors(gram, right, torch.float32),  # noqa: B023
        ]
        whole, *others = map(least, ways)
        exact = torch.linalg.solve(gram + GRID[0] * torch.eye(width).double(), right.T).T
        errors = [
            float((way()[0] - exact).norm() / exact.norm()) for n, way in enumerate(ways) if n != 1
        ]
        print(
            f"| {width} | {1e3 * whole:.1f} | "
            + " | ".join(f"{other / whole:.2f}" for other in others)
            + f" | {' / '.join(f'{error:.0e}' for error in errors)} |"
        )


if __name__ == "__main__":
    main()
