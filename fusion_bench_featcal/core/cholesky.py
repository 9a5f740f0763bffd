"""Solving the normal equations `W A = R`, checked (Eq. 17)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.finite import not_finite
from fusion_bench_featcal.core.products import mirror_lower, times_transposed

MAX_RESIDUAL = 1e-6
"""Largest accepted relative residual of the normal equations."""

MAX_SINGLE_RESIDUAL = 1e-5
"""The same where float32 is solved in: what exceeds it is solved again in float64."""

SINGLE_LAMBDA = 1e-2
"""From this lambda on float32 moments are solved in float32: their system's condition is at most
the number of tasks over lambda."""

PROBES = 16
"""Number of random vectors that stand for all of a matrix's columns, or for all outputs."""

_POWER_VECTORS, _POWER_STEPS = 2, 4
_STRIP = 512

BLOCK = 256
"""Width of a block: its own factor and inverse take little of the time."""

PIVOT_MARGIN = 4
"""A pivot must exceed this many times the dimension's worth of rounding to count as non-zero."""


class UnsolvedError(ArithmeticError):
    """The normal equations have no trustworthy solution; the message says what to raise.

    Attributes:
        module: The module whose equations they are, if that is known.
    """

    module: str = ""


def solve_dtype(device: torch.device) -> torch.dtype:
    """Dtype of the solves on a device: float64 wherever there is one."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True, kw_only=True)
class Factor:
    """Cholesky factor of the normal equations' matrix, at which the host has not looked yet.

    Attributes:
        lower: `L`, `[d, d]`.
        signs: What tells whether it can be trusted, `[5]`: whether the matrix was not finite,
            whether the factorisation failed, smallest pivot, largest diagonal entry, and the
            condition number, estimated.
    """

    SIGNS: ClassVar[int] = 5
    lower: Float[Tensor, "d d"]
    signs: Float[Tensor, "5"]


def factor_of(system: Float[Tensor, "d d"]) -> Factor:
    """Factorise, and leave it to `trusted_condition` to tell what it is worth.

    Args:
        system: `sum_i w_i G_i + (lambda + eps) I`, `[d, d]`, symmetric.
    """
    factorise = cholesky_by_blocks if _are_products_faster(system) else torch.linalg.cholesky_ex
    lower, info = factorise(system)
    pivots = lower.diagonal() ** 2
    largest, condition = system.diagonal().max(), estimated_condition(system, lower)
    signs = (not_finite(system), info != 0, pivots.min(), largest, condition)
    return Factor(lower=lower, signs=torch.stack([sign.to(system.dtype) for sign in signs]))


def estimated_condition(
    system: Float[Tensor, "d d"], lower: Float[Tensor, "d d"]
) -> Float[Tensor, ""]:
    """Condition number of a positive definite matrix, by power iterations on it and its inverse.

    Never too large but for rounding, and seldom too small by more than a half. The ratio of the
    factor's pivots is a lower bound too, but one that can miss by orders of magnitude.

    Args:
        system: `A`, `[d, d]`.
        lower: Its lower Cholesky factor.
    """
    largest = smallest = random_signs(len(system), system.dtype, system.device)[:, :_POWER_VECTORS]
    for _ in range(_POWER_STEPS):
        largest = system @ (largest / torch.linalg.vector_norm(largest, dim=0))
        smallest = smallest / torch.linalg.vector_norm(smallest, dim=0)
        half = torch.linalg.solve_triangular(lower, smallest, upper=False)
        smallest = torch.linalg.solve_triangular(lower.T, half, upper=True)
    return torch.linalg.vector_norm(largest, dim=0).max() * torch.linalg.vector_norm(
        smallest, dim=0
    ).max().clamp_min(0)


def trusted_condition(signs: Sequence[float], *, size: int, floor: float, rounding: float) -> float:
    """Condition of a factorised matrix, where the factor can be trusted.

    Args:
        signs: The factor's, on the host.
        size: `d`.
        floor: `lambda + eps`, which no exact eigenvalue is below.
        rounding: Rounding of the Gram matrices relative to their diagonal. Pivots of its size mean
            nothing, unless the floor stands above it.

    Returns:
        The estimate, as `estimated_condition` gives it.

    Raises:
        UnsolvedError: If the matrix is not finite, not positive definite, or rounding of the grams
            would decide the solution.
    """
    broken, failed, least, diagonal, condition = signs
    if broken:
        raise UnsolvedError("the normal equations are not finite")
    if failed:
        raise UnsolvedError("the normal equations are singular (Cholesky factorisation failed)")
    noise = rounding * diagonal
    if floor < noise and least < PIVOT_MARGIN * size * noise:
        raise UnsolvedError(
            f"the normal equations are singular to rounding (condition about {condition:.1e})"
        )
    return condition


def solve_factorised(
    factor: Float[Tensor, "d d"],
    system: Float[Tensor, "d d"],
    right: Float[Tensor, "m d"],
) -> tuple[Float[Tensor, "m d"], Float[Tensor, ""]]:
    """Solve `W A = R` from the factor of `A`, and leave it to `check_residual` to accept it.

    Args:
        factor: Lower Cholesky factor of `system`, in whose dtype is solved.
        system: `A`, `[d, d]`.
        right: `R`, `[m, d]`.

    Returns:
        `W`, `[m, d]`, and the relative residual `|W A - R|_F / |R|_F` (0 where R is 0), as
        `relative_residual` estimates it.
    """
    weight = triangular_solves(right, factor)
    return weight, relative_residual(weight, system, right)


def check_residual(residual: float, dtype: torch.dtype) -> None:
    """Accept a solution or not.

    Args:
        residual: Its relative residual.
        dtype: What was solved in.

    Raises:
        UnsolvedError: If the residual exceeds what the dtype allows, or is NaN.
    """
    limit = MAX_RESIDUAL if dtype == torch.float64 else MAX_SINGLE_RESIDUAL
    if not residual <= limit:
        raise UnsolvedError(
            f"the normal equations stay unsolved (relative residual {residual:.1e})"
        )


def triangular_solves(
    right: Float[Tensor, "m d"], factor: Float[Tensor, "d d"]
) -> Float[Tensor, "m d"]:
    """`R (L L')^-1`; faster than `torch.cholesky_solve`, which copies the factor.

    Args:
        right: `R`, `[m, d]`.
        factor: `L`, `[d, d]`, lower.
    """
    if _are_products_faster(factor):
        return solve_by_blocks(right, factor)
    return solve_by_lapack(right, factor)


def solve_by_lapack(
    right: Float[Tensor, "m d"], factor: Float[Tensor, "d d"]
) -> Float[Tensor, "m d"]:
    """`R (L L')^-1` by LAPACK; for few right sides the fastest.

    Args:
        right: `R`, `[m, d]`.
        factor: `L`, `[d, d]`, lower.
    """
    half = torch.linalg.solve_triangular(factor.T, right, upper=True, left=False)
    return torch.linalg.solve_triangular(factor, half, upper=False, left=False)


def relative_residual(
    weight: Float[Tensor, "m d"], system: Float[Tensor, "d d"], right: Float[Tensor, "m d"]
) -> Float[Tensor, ""]:
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
    signs = random_signs(len(system), wide, system.device)

    def times(matrix: Tensor, vectors: Tensor) -> Tensor:
        return torch.cat([strip.to(wide) @ vectors for strip in matrix.split(_STRIP)])

    wanted = times(right, signs)
    error = frobenius_norm(times(weight, times(system, signs)) - wanted)
    scale = frobenius_norm(wanted)
    return torch.where(scale > 0, error / scale, error)


@lru_cache(maxsize=8)  # a model has few widths; on a GPU the host waits when they are copied to it
def random_signs(size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "n 16"]:
    """Vectors of random signs, the same for every size in every run.

    Args:
        size: Length of a vector.
        dtype: Dtype of the signs.
        device: Their device.
    """
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (size, PROBES), generator=generator).mul_(2).sub_(1)
    return signs.to(device=device, dtype=dtype)


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


# Cholesky factor and triangular solves by products of blocks. Most of their work is in products,
# which may go through a faster library than LAPACK's.


def _are_products_faster(like: Tensor) -> bool:
    """Tell whether float32 products are faster than LAPACK: on CPUs by a fourth and more."""
    return like.is_cpu and like.dtype == torch.float32


def cholesky_by_blocks(
    system: Float[Tensor, "d d"],
) -> tuple[Float[Tensor, "d d"], Tensor]:
    """Lower Cholesky factor.

    Args:
        system: A symmetric matrix; only its lower triangle is looked at.

    Returns:
        The factor, and a scalar that is 0 if there is one, as `torch.linalg.cholesky_ex` has it.
    """
    lower, failed = torch.zeros_like(system), torch.zeros((), dtype=torch.int)
    for start, stop in _blocks(len(system)):
        panel = system[start:, start:stop]
        if start:
            done = lower[start:, :start]
            panel = panel - times_transposed(done, done[: stop - start])
        corner, info = torch.linalg.cholesky_ex(panel[: stop - start])
        failed = failed + info
        lower[start:stop, start:stop] = corner
        lower[stop:, start:stop] = torch.linalg.solve_triangular(
            corner.T, panel[stop - start :], upper=True, left=False
        )
    return lower, failed


def solve_by_blocks(
    right: Float[Tensor, "m d"], lower: Float[Tensor, "d d"]
) -> Float[Tensor, "m d"]:
    """`R (L L')^-1`.

    The factor's diagonal blocks are inverted. They are better conditioned than the factor, and who
    asks looks at the residual.

    Args:
        right: `R`, `[m, d]`.
        lower: `L`, `[d, d]`.
    """
    solution, blocks = right.clone(), list(_blocks(len(lower)))
    unit = torch.eye(BLOCK, dtype=lower.dtype)
    inverses = [
        torch.linalg.solve_triangular(corner, unit[: len(corner), : len(corner)], upper=False)
        for corner in (lower[start:stop, start:stop] for start, stop in blocks)
    ]
    for (start, stop), inverse in zip(blocks, inverses, strict=True):
        part = solution[:, start:stop]
        if start:
            part -= times_transposed(solution[:, :start], lower[start:stop, :start])
        part.copy_(times_transposed(part, inverse))
    for (start, stop), inverse in reversed(list(zip(blocks, inverses, strict=True))):
        part = solution[:, start:stop]
        if stop < len(lower):
            part -= times_transposed(solution[:, stop:], lower[stop:, start:stop].T)
        part.copy_(times_transposed(part, inverse.T))
    return solution


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, BLOCK):
        yield start, min(start + BLOCK, size)


def frobenius_norm(matrix: Float[Tensor, "m d"]) -> Float[Tensor, ""]:
    """Return the Frobenius norm, exact to rounding at any size.

    torch's float32 norm of a large matrix sums millions of squares in one accumulator and is up to
    6e-3 too small on a CPU. Rows are short sums, and so are their norms in float64.
    """
    rows = torch.linalg.vector_norm(matrix, dim=1)
    return torch.linalg.vector_norm(rows.to(solve_dtype(rows.device))).to(matrix.dtype)
