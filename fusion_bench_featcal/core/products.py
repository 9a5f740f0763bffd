"""Products that are added to sums in place, and symmetric matrices built from one triangle."""

from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.kernels import multiplies_rows_by_onednn, multiply_transposed

COLUMN_BLOCKS = 16
"""Largest number of strips of a Gram matrix's lower triangle. 16 are 17/32 of the product."""

SMALL = 192
"""Narrower strips than this cost more than they save. A tile of this size and its transpose fit
the second-level cache together."""

LARGEST_PRODUCT = 2**24
"""Entries of a product that is in memory by itself before it is added to a sum."""


def multiply(
    weight: Float[Tensor, "m d"], moment: Float[Tensor, "d k"], *, symmetric: bool = False
) -> Float[Tensor, "m k"]:
    """Return `W M`. A symmetric moment need not be transposed for oneDNN."""
    if not multiplies_rows_by_onednn(weight):
        return weight @ moment
    right = moment if symmetric else moment.T.contiguous()
    return multiply_transposed(weight.contiguous(), right)


def columns_of(rows: Tensor) -> Tensor:
    """Return rows `[n, d]` in the layout `[d, n]` of the sums below. Only oneDNN needs a copy."""
    return rows.T.contiguous() if multiplies_rows_by_onednn(rows) else rows.T


def add_product(into: Tensor, first: Tensor, second: Tensor, weight: float = 1.0) -> None:
    """Compute `into += weight first second'`.

    Args:
        into: `[m, d]`.
        first: `[m, n]`, from `columns_of`.
        second: `[d, n]`, from `columns_of`.
        weight: A factor.
    """
    if multiplies_rows_by_onednn(into):
        # oneDNN does not add to a matrix. Its product is a further matrix, which strips keep small.
        rows = max(1, LARGEST_PRODUCT // into.shape[1])
        for total, part in zip(into.split(rows), first.split(rows), strict=True):
            total.add_(multiply_transposed(part, second), alpha=weight)
    else:
        into.addmm_(first, second.T, alpha=weight)


def add_lower_gram(into: Tensor, columns: Tensor, weight: float = 1.0) -> None:
    """Compute `into += weight columns columns'` in the lower triangle.

    Args:
        into: `[d, d]`. Strips also write some entries above the diagonal. The others do not change.
        columns: `[d, n]`, from `columns_of`.
        weight: A factor.
    """
    for start, stop in _strips(len(into)):
        add_product(into[start:stop, :stop], columns[start:stop], columns[:stop], weight)


def _strips(width: int) -> list[tuple[int, int]]:
    step = max(SMALL, -(-width // COLUMN_BLOCKS))
    return [(start, min(start + step, width)) for start in range(0, width, step)]


def mirror_lower(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Copy the lower triangle of a matrix to its upper triangle, in place.

    On the CPU this is done by tiles: torch transposes a contiguous tile fast, but a strip of a
    larger matrix slowly.

    Args:
        matrix: `[d, d]`, exactly symmetric afterwards.

    Returns:
        The matrix.
    """
    tile = SMALL if matrix.device.type == "cpu" else len(matrix)
    for start in range(0, len(matrix), SMALL):
        stop = start + SMALL
        corner = matrix[start:stop, start:stop]
        corner.copy_(corner.tril() + corner.tril(-1).T)
        for column in range(0, start, tile):
            right = min(column + tile, start)
            below = matrix[start:stop, column:right].contiguous()
            matrix[column:right, start:stop] = below.T.contiguous()
    return matrix
