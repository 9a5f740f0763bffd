"""Solving the normal equations `W A = R`, checked (Eq. 17)."""

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.core.moments import frobenius_norm
from fusion_bench_featcal.core.triangle import mirror_lower

MAX_RESIDUAL = 1e-6
"""Largest accepted relative residual of the normal equations."""

MAX_SINGLE_RESIDUAL = 1e-5
"""The same where float32 is solved in: what exceeds it is solved again in float64."""

SINGLE_LAMBDA = 1e-2
"""From this lambda on float32 moments are solved in float32: their system's condition is at most
the number of tasks over lambda."""

_PROBES = 16
_STRIP = 512

PIVOT_MARGIN = 4
"""A pivot must exceed this many times the dimension's worth of rounding to count as non-zero."""


class UnsolvedError(ArithmeticError):
    """The normal equations have no trustworthy solution; the message says what to raise."""


def solve_dtype(device: torch.device) -> torch.dtype:
    """Dtype of the solves on a device: float64 wherever there is one."""
    return torch.float32 if device.type == "mps" else torch.float64


def factorise(
    system: Float[Tensor, "d d"], *, floor: float, precision: torch.dtype
) -> tuple[Float[Tensor, "d d"], float]:
    """Cholesky factor of the normal equations' matrix, checked.

    Args:
        system: `sum_i w_i G_i + (lambda + eps) I`, `[d, d]`, symmetric.
        floor: `lambda + eps`, which no exact eigenvalue is below.
        precision: Dtype in which the grams were summed. Pivots of the size of their rounding mean
            nothing, unless the floor stands above it.

    Returns:
        The lower factor `L` and the condition estimate `(max diag L / min diag L)^2`.

    Raises:
        UnsolvedError: If the matrix is not finite, not positive definite, or rounding of the grams
            would decide the solution.
    """
    if not all_finite(system):
        raise UnsolvedError("the normal equations are not finite")
    factor, info = torch.linalg.cholesky_ex(system)
    if int(info) != 0:
        raise UnsolvedError("the normal equations are singular (Cholesky factorisation failed)")
    pivots = factor.diagonal() ** 2
    condition = float(pivots.max() / pivots.min())
    rounding = torch.finfo(precision).eps * float(system.diagonal().max())
    if floor < rounding and float(pivots.min()) < PIVOT_MARGIN * len(system) * rounding:
        raise UnsolvedError(
            f"the normal equations are singular to rounding (condition about {condition:.1e})"
        )
    return factor, condition


def solve_factorised(
    factor: Float[Tensor, "d d"], system: Float[Tensor, "d d"], right: Float[Tensor, "m d"]
) -> tuple[Float[Tensor, "m d"], float]:
    """Solve `W A = R` from the factor of `A` and check the solution.

    Args:
        factor: Lower Cholesky factor of `system`, in whose dtype is solved.
        system: `A`, `[d, d]`.
        right: `R`, `[m, d]`.

    Returns:
        `W`, `[m, d]`, and the relative residual `|W A - R|_F / |R|_F` (0 where R is 0), as
        `relative_residual` estimates it.

    Raises:
        UnsolvedError: If the residual exceeds what the dtype allows or the solution is not finite.
    """
    weight = triangular_solves(right, factor)
    residual = relative_residual(weight, system, right)
    limit = MAX_RESIDUAL if factor.dtype == torch.float64 else MAX_SINGLE_RESIDUAL
    if not residual <= limit:  # also true for NaN
        raise UnsolvedError(
            f"the normal equations stay unsolved (relative residual {residual:.1e})"
        )
    return weight, residual


def triangular_solves(
    right: Float[Tensor, "m d"], factor: Float[Tensor, "d d"]
) -> Float[Tensor, "m d"]:
    """`R (L L')^-1`; faster than `torch.cholesky_solve`, which copies the factor.

    Args:
        right: `R`, `[m, d]`.
        factor: `L`, `[d, d]`, lower.
    """
    half = torch.linalg.solve_triangular(factor.T, right, upper=True, left=False)
    return torch.linalg.solve_triangular(factor, half, upper=False, left=False)


def relative_residual(
    weight: Float[Tensor, "m d"], system: Float[Tensor, "d d"], right: Float[Tensor, "m d"]
) -> float:
    """Estimate `|W A - R|_F / |R|_F` from what both sides do to a few vectors of random signs.

    For such a vector z the mean of `|M z|^2` is `|M|_F^2`. The whole product would cost as much as
    the solve. The products are taken in float64, a strip of rows at a time.

    Args:
        weight: `W`, `[m, d]`.
        system: `A`, `[d, d]`.
        right: `R`, `[m, d]`.

    Returns:
        The estimate; NaN where an entry of W or A is; the absolute residual where R is 0.
    """
    wide = solve_dtype(system.device)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (len(system), _PROBES), generator=generator).mul_(2).sub_(1)
    signs = signs.to(device=system.device, dtype=wide)

    def times(matrix: Tensor, vectors: Tensor) -> Tensor:
        return torch.cat([strip.to(wide) @ vectors for strip in matrix.split(_STRIP)])

    wanted = times(right, signs)
    error = frobenius_norm(times(weight, times(system, signs)) - wanted)
    scale = frobenius_norm(wanted)
    return float(error / scale if scale > 0 else error)


def ridge_system(
    weighted_gram: Float[Tensor, "d d"], *, ridge_lambda: float, eps: float, dtype: torch.dtype
) -> Float[Tensor, "d d"]:
    """`sum_i w_i G_i + (lambda + eps) I` in a dtype, exactly symmetric (Eq. 17).

    Args:
        weighted_gram: `sum_i w_i G_i`, `[d, d]`, symmetric; only its lower triangle is looked at.
        ridge_lambda: lambda.
        eps: Stabiliser.
        dtype: Dtype of the system. Where it is the gram's own, the gram is turned into the system.
    """
    system = weighted_gram.to(dtype)
    mirror_lower(system)
    system.diagonal().add_(ridge_lambda + eps)
    return system
