"""Solving the normal equations `W A = R`, checked (Eq. 17)."""

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.moments import frobenius_norm

MAX_RESIDUAL = 1e-6
"""Largest accepted relative residual of the normal equations."""

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
    if not bool(torch.isfinite(system).all()):
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
        factor: Lower Cholesky factor of `system`.
        system: `A`, `[d, d]`.
        right: `R`, `[m, d]`.

    Returns:
        `W`, `[m, d]`, and the relative residual `|W A - R|_F / |R|_F` (0 where R is 0).

    Raises:
        UnsolvedError: If the residual exceeds `MAX_RESIDUAL` or the solution is not finite.
    """
    weight = torch.cholesky_solve(right.T, factor).T
    scale = float(frobenius_norm(right))
    error = float(frobenius_norm(weight @ system - right))
    residual = error / scale if scale > 0 else error
    if not residual <= MAX_RESIDUAL:  # also true for NaN
        raise UnsolvedError(
            f"the normal equations stay unsolved (relative residual {residual:.1e})"
        )
    return weight, residual


def ridge_system(
    weighted_gram: Float[Tensor, "d d"], *, ridge_lambda: float, eps: float
) -> Float[Tensor, "d d"]:
    """`sum_i w_i G_i + (lambda + eps) I` in the solve's dtype, exactly symmetric (Eq. 17)."""
    wide = weighted_gram.to(solve_dtype(weighted_gram.device))
    system = (wide + wide.T).div_(2)
    system.diagonal().add_(ridge_lambda + eps)
    return system
