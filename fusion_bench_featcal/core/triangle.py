"""Symmetric matrices of which one half was formed."""

import torch
from jaxtyping import Float
from torch import Tensor

_TILE = 192
"""A tile and its transpose fit the second-level cache together."""


def norm_of_lower(matrix: Float[Tensor, "d d"]) -> Tensor:
    """Frobenius norm of the symmetric matrix whose lower triangle is given.

    Exact to rounding at any size, as `core.moments.frobenius_norm`.

    Args:
        matrix: `[d, d]`; what is above the diagonal is not looked at.

    Returns:
        The norm as a scalar of the matrix's dtype.
    """
    wide = matrix.dtype if matrix.device.type == "mps" else torch.float64
    squares = matrix.diagonal().to(wide).square().sum()
    for start in range(0, len(matrix), _TILE):
        stop = start + _TILE
        corner = matrix[start:stop, start:stop].tril(-1)
        for below in (corner, matrix[start:stop, :start]):
            squares = squares + 2 * torch.linalg.vector_norm(below, dim=1).to(wide).square().sum()
    return squares.sqrt().to(matrix.dtype)


def mirror_lower(matrix: Float[Tensor, "d d"]) -> None:
    """Copy what is below the diagonal to what is above it, in place.

    On the CPU tile by tile: torch copies a transposed tile of its own fast, and a transposed strip
    of a larger matrix slowly.

    Args:
        matrix: `[d, d]`; afterwards exactly symmetric.
    """
    tile = _TILE if matrix.device.type == "cpu" else len(matrix)
    for start in range(0, len(matrix), _TILE):
        stop = start + _TILE
        corner = matrix[start:stop, start:stop]
        corner.copy_(corner.tril() + corner.tril(-1).T)
        for left in range(0, start, tile):
            right = min(left + tile, start)
            below = matrix[start:stop, left:right].contiguous()
            matrix[left:right, start:stop] = below.T.contiguous()
