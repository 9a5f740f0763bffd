"""Cholesky factor and triangular solves by products of blocks.

Most of their work is in products, which may go through a faster library than LAPACK's.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
"""`left right'` of two matrices."""

BLOCK = 256
"""Width of a block: its own factor and inverse take little of the time."""


def cholesky_by_blocks(
    system: Float[Tensor, "d d"], times: Product
) -> tuple[Float[Tensor, "d d"], Tensor]:
    """Lower Cholesky factor.

    Args:
        system: A symmetric matrix; only its lower triangle is looked at.
        times: What multiplies.

    Returns:
        The factor, and a scalar that is 0 if there is one, as `torch.linalg.cholesky_ex` has it.
    """
    lower, failed = torch.zeros_like(system), torch.zeros((), dtype=torch.int)
    for start, stop in _blocks(len(system)):
        panel = system[start:, start:stop]
        if start:
            done = lower[start:, :start]
            panel = panel - times(done, done[: stop - start])
        corner, info = torch.linalg.cholesky_ex(panel[: stop - start])
        failed = failed + info
        lower[start:stop, start:stop] = corner
        lower[stop:, start:stop] = torch.linalg.solve_triangular(
            corner.T, panel[stop - start :], upper=True, left=False
        )
    return lower, failed


def solve_by_blocks(
    right: Float[Tensor, "m d"], lower: Float[Tensor, "d d"], times: Product
) -> Float[Tensor, "m d"]:
    """`R (L L')^-1`.

    The factor's diagonal blocks are inverted. They are better conditioned than the factor, and who
    asks looks at the residual.

    Args:
        right: `R`, `[m, d]`.
        lower: `L`, `[d, d]`.
        times: What multiplies.
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
            part -= times(solution[:, :start], lower[start:stop, :start])
        part.copy_(times(part, inverse))
    for (start, stop), inverse in reversed(list(zip(blocks, inverses, strict=True))):
        part = solution[:, start:stop]
        if stop < len(lower):
            part -= times(solution[:, stop:], lower[stop:, start:stop].T)
        part.copy_(times(part, inverse.T))
    return solution


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, BLOCK):
        yield start, min(start + BLOCK, size)
