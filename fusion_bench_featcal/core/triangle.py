"""Symmetric matrices of which one half was formed."""

from jaxtyping import Float
from torch import Tensor

_TILE = 192
"""A tile and its transpose fit the second-level cache together."""


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
