"""Ridge systems `E (G + r I) = R`, solved by Cholesky and checked (Eq. 17)."""

from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.finite import read_back

SINGLE_RIDGE = 1e-2
"""Smallest ridge for which float32 is tried first. With the paper's rule each of N tasks' Gram
matrices has norm 1, so that the condition of the system is at most 1 + N / ridge. With FeatCal+ the
mean of the diagonal is 1, and the bound is 1 + width / ridge: there the residual decides more often
whether float64 is needed."""

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
"""Largest accepted residual, relative to the right-hand side."""

PIVOT_MARGIN = 4
"""A pivot counts as non-zero above this number of rounding errors per dimension."""

PROBES = 16
"""Number of random vectors that represent all columns of a matrix, or all outputs."""

_STRIP = 512


class UnsolvedError(ArithmeticError):
    """The normal equations have no solution that can be trusted."""


def solve_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of solves on a device: float64 if the device supports it."""
    return torch.float32 if device.type == "mps" else torch.float64


@lru_cache(maxsize=8)  # models have few widths, and copying to a GPU makes the host wait
def random_signs(size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "n 16"]:
    """Return vectors of random signs, equal for equal sizes in every run."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (size, PROBES), generator=generator).mul_(2).sub_(1)
    return signs.to(device=device, dtype=dtype)


def solve_ridge(
    gram: Float[Tensor, "d d"],
    right: Float[Tensor, "m d"],
    ridge: float,
    *,
    rounding: float = 0.0,
) -> tuple[Float[Tensor, "m d"], float]:
    """Solve `E (G + r I) = R` in float32, or in float64 if float32 is not precise enough.

    Args:
        gram: `G`, symmetric, float32 or float64.
        right: `R`.
        ridge: `r` >= 0. Zero needs a `G` of full rank.
        rounding: Rounding of `G` relative to its diagonal.

    Returns:
        `E`, and the residual `|E A - R|_F / |R|_F`, estimated.

    Raises:
        UnsolvedError: If the solution cannot be trusted.
    """
    wide = solve_dtype(gram.device)
    first = gram.dtype if ridge >= SINGLE_RIDGE else wide
    diagonal, problem = gram.diagonal().clone(), ""
    for dtype in dict.fromkeys((first, wide)):
        system = gram.to(dtype)  # a copy in the same dtype would be the largest matrix of a run
        system.diagonal().copy_(diagonal).add_(ridge)
        step, residual, problem = _solved(system, right.to(dtype), ridge, rounding)
        gram.diagonal().copy_(diagonal)
        if not problem:
            return step, residual
    raise UnsolvedError(f"the normal equations {problem}")


def _solved(
    system: Tensor, right: Tensor, ridge: float, rounding: float
) -> tuple[Tensor, float, str]:
    """Return a solution, its residual, and what is wrong with it, if anything."""
    lower, failed = torch.linalg.cholesky_ex(system)
    step = right_solved(right, lower)
    noise = rounding * system.diagonal().max()
    margin = lower.diagonal().square().min() - PIVOT_MARGIN * len(system) * noise
    numbers = read_back([failed, margin, noise, relative_residual(step, system, right)])
    has_failed, least_margin, most_noise, residual = numbers
    if has_failed:
        return step, residual, "are singular (Cholesky factorisation failed)"
    if ridge < most_noise and least_margin < 0:
        return step, residual, "are singular to rounding"
    if not residual <= TOLERANCE[system.dtype]:
        return step, residual, f"are not solved (relative residual {residual:.1e})"
    return step, residual, ""


def right_solved(right: Float[Tensor, "m d"], lower: Float[Tensor, "d d"]) -> Float[Tensor, "m d"]:
    """Return `R (L L')^-1`. Unlike `torch.cholesky_solve` it does not copy the factor."""
    half = torch.linalg.solve_triangular(lower.mT, right, upper=True, left=False)
    return torch.linalg.solve_triangular(lower, half, upper=False, left=False)


def relative_residual(
    step: Float[Tensor, "m d"], system: Float[Tensor, "d d"], right: Float[Tensor, "m d"]
) -> Float[Tensor, ""]:
    """Estimate `|E A - R|_F / |R|_F` by applying both sides to a few vectors of random signs.

    For a vector z of random signs the mean of `|M z|^2` is `|M|_F^2`. The whole product would cost
    as much as the solve. The result is NaN if an entry is NaN, and the absolute residual if R is 0.
    """
    signs = random_signs(len(system), solve_dtype(system.device), system.device)
    target = _wide_product(right, signs)
    error = (_wide_product(step, _wide_product(system, signs)) - target).norm()
    scale = target.norm()
    return torch.where(scale > 0, error / scale, error)


def _wide_product(matrix: Float[Tensor, "m d"], vectors: Tensor) -> Float[Tensor, "m 16"]:
    """Return the product with vectors, in the dtype of the vectors."""
    strips = matrix.split(_STRIP)  # a wide copy of all would be the largest matrix of a run
    return torch.cat([strip.to(vectors.dtype) @ vectors for strip in strips])
