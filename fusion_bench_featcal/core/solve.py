"""Ridge systems `E (G + r I) = R`, solved by Cholesky and checked (Eq. 17)."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.finite import read_back
from fusion_bench_featcal.core.products import mirror_lower

SINGLE_RIDGE = 1e-2
"""Smallest ridge for which float32 is tried first. As Gram matrices have norm 1, the condition of
the system is at most the number of tasks divided by the ridge."""

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
"""Largest accepted residual, relative to the right-hand side."""

PIVOT_MARGIN = 4
"""A pivot counts as non-zero above this number of rounding errors per dimension."""

PROBES = 16
"""Number of random probe vectors that represent all columns of a matrix, or all outputs."""

_POWER_VECTORS, _POWER_STEPS = 2, 4
_STRIP = 512
_PANEL = 512
"""Columns per panel of the factor. Products between panels are faster on CPUs than LAPACK."""

_ROWS = 2048
"""Rows of `R` per solve, which bounds the size of the intermediate result."""


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


@dataclass(frozen=True)
class Solution:
    """Solution of one ridge system for each of `g` maps.

    Attributes:
        step: `E`, `[g, m, d]`.
        residual: `|E A - R|_F / |R|_F`, estimated, the largest over the maps.
        condition: Condition number, estimated by power iterations, the largest over the maps.
    """

    step: Float[Tensor, "g m d"]
    residual: float
    condition: float


def solve_ridge(
    gram: Float[Tensor, "g d d"],
    right: Float[Tensor, "g m d"],
    ridge: float,
    *,
    rounding: float,
) -> Solution:
    """Solve `E (G + r I) = R` in float32, or in float64 if float32 is not precise enough.

    Args:
        gram: `G`, symmetric, float32 or float64. It is overwritten, because a copy would be the
            largest matrix of a run.
        right: `R`.
        ridge: `r` >= 0. Zero needs a `G` of full rank.
        rounding: Rounding of `G` relative to its diagonal.

    Raises:
        UnsolvedError: If the solution cannot be trusted.
    """
    wide = solve_dtype(gram.device)
    if ridge >= SINGLE_RIDGE and gram.dtype != wide:
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        before = diagonal.clone()
        try:
            return _solve_in(gram.dtype, gram, right, ridge, rounding)
        except UnsolvedError:  # float64 may be precise enough
            for matrix in gram:
                mirror_lower(matrix.T)  # the factor took the lower triangle alone
            diagonal.copy_(before)
    return _solve_in(wide, gram, right, ridge, rounding)


def _solve_in(
    dtype: torch.dtype, gram: Tensor, right: Tensor, ridge: float, rounding: float
) -> Solution:
    system, right = gram.to(dtype), right.to(dtype)
    system.diagonal(dim1=-2, dim2=-1).add_(ridge)
    # Everything that needs the system comes before its factor overwrites it.
    signs = random_signs(system.shape[-1], solve_dtype(system.device), system.device)
    image, largest = _wide_product(system, signs), _largest_eigenvalue(system)
    noise = rounding * system.diagonal(dim1=-2, dim2=-1).amax(-1)
    failed = factor_in_place(system)
    step = divided(right, system)
    pivots = system.diagonal(dim1=-2, dim2=-1).square().amin(-1)
    margin = pivots - PIVOT_MARGIN * len(system[0]) * noise
    numbers = (
        failed,
        margin.min(),
        noise.max(),
        (largest * _largest_eigenvalue(system, inverse=True)).max(),
        relative_residual(step, image, right).max(),
    )
    has_failed, least_margin, most_noise, condition, residual = read_back(numbers)
    if has_failed:
        raise UnsolvedError("the normal equations are singular (Cholesky factorisation failed)")
    if ridge < most_noise and least_margin < 0:
        raise UnsolvedError(
            f"the normal equations are singular to rounding (condition about {condition:.1e})"
        )
    if not residual <= TOLERANCE[dtype]:
        raise UnsolvedError(
            f"the normal equations stay unsolved (relative residual {residual:.1e})"
        )
    return Solution(step, residual, condition)


def factor_in_place(system: Float[Tensor, "g d d"]) -> Tensor:
    """Overwrite the lower triangle of `A = L L'` by `L`, panel by panel. The upper one stays.

    Returns:
        Number of pivots that are not positive, a scalar on the device. Above 0 there is no factor
        `L`.
    """
    failed, width = torch.zeros((), dtype=torch.int64, device=system.device), system.shape[-1]
    for start in range(0, width, _PANEL):
        stop = min(start + _PANEL, width)
        square = corner = system[:, start:stop, start:stop]
        below = system[:, stop:, start:stop]
        if start:
            done = system[:, start:stop, :start].mT
            square = torch.baddbmm(corner, done.mT, done, alpha=-1)
            below.baddbmm_(system[:, stop:, :start], done, alpha=-1)
        lower, info = torch.linalg.cholesky_ex(square)
        failed += info.count_nonzero()
        corner.copy_(lower + corner.triu(1))
        for rows in below.split(_ROWS, 1):
            rows.copy_(torch.linalg.solve_triangular(lower.mT, rows, upper=True, left=False))
    return failed


def shifted(
    gram: Float[Tensor, "*g d d"], ridge: Tensor | float, dtype: torch.dtype
) -> Float[Tensor, "*g d d"]:
    """Return `G + r I`."""
    system = gram.to(dtype, copy=True)
    system.diagonal(dim1=-2, dim2=-1).add_(ridge)
    return system


def divided(
    right: Float[Tensor, "*g m d"], lower: Float[Tensor, "*g d d"]
) -> Float[Tensor, "*g m d"]:
    """Return `R (L L')^-1`. Unlike `torch.cholesky_solve` it does not copy the factor."""
    if right.shape[-2] > _ROWS:
        result = torch.empty_like(right)
        for part, rows in zip(result.split(_ROWS, -2), right.split(_ROWS, -2), strict=True):
            part.copy_(divided(rows, lower))
        return result
    half = torch.linalg.solve_triangular(lower.mT, right, upper=True, left=False)
    return torch.linalg.solve_triangular(lower, half, upper=False, left=False)


def _largest_eigenvalue(system: Tensor, *, inverse: bool = False) -> Float[Tensor, " g"]:
    """Estimate the largest eigenvalue of a system, or of its inverse, by power iterations.

    The estimate is seldom too small by more than a half. The ratio of the factor's pivots is also a
    lower bound of the condition, but can be wrong by orders of magnitude.

    Args:
        system: The system, or for the inverse its factor from `factor_in_place`.
        inverse: Whether to estimate for the inverse.
    """
    signs = random_signs(system.shape[-1], system.dtype, system.device)
    vectors = signs.T[:_POWER_VECTORS].expand(len(system), -1, -1)
    for _ in range(_POWER_STEPS):
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
        vectors = divided(vectors, system) if inverse else vectors @ system
    return torch.linalg.vector_norm(vectors, dim=-1).amax(-1)


def _wide_product(matrix: Float[Tensor, "g m d"], vectors: Tensor) -> Float[Tensor, "g m 16"]:
    """Return the product with vectors, in the dtype of the vectors."""
    strips = matrix.split(_STRIP, dim=1)  # a wide copy of all would be the largest matrix of a run
    return torch.cat([strip.to(vectors.dtype) @ vectors for strip in strips], 1)


def relative_residual(
    step: Float[Tensor, "g m d"], image: Float[Tensor, "g d 16"], right: Float[Tensor, "g m d"]
) -> Float[Tensor, " g"]:
    """Estimate `|E A - R|_F / |R|_F` by applying both sides to a few vectors of random signs.

    For a vector z of random signs the mean of `|M z|^2` is `|M|_F^2`. The whole product would cost
    as much as the solve. The result is NaN if an entry is NaN, and the absolute residual if R is 0.

    Args:
        step: `E`.
        image: `A z` for each vector.
        right: `R`.
    """
    signs = random_signs(right.shape[-1], image.dtype, right.device)
    target = _wide_product(right, signs)
    error = (_wide_product(step, image) - target).flatten(1).norm(dim=1)
    scale = target.flatten(1).norm(dim=1)
    return torch.where(scale > 0, error / scale, error)
