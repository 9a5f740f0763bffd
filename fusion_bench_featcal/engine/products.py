"""Matrix products that add to sums in place: no temporary of the sums' size."""

from torch import Tensor

from fusion_bench_featcal.engine.kernels import multiplies_rows_by_onednn, multiply_transposed

COLUMN_BLOCKS = 16
"""A gram is formed by at most so many strips of its lower triangle: 17/32 of the whole product."""

SMALL = 192
"""Narrower strips than this cost more than they save."""


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """`into += left' right`.

    Args:
        into: `[m, d]`.
        left: Rows `[n, m]`.
        right: Rows `[n, d]`.
    """
    if multiplies_rows_by_onednn(into):
        into.add_(multiply_transposed(left.T.contiguous(), right.T.contiguous()))
    else:
        into.addmm_(left.T, right)


def add_lower_gram(into: Tensor, left: Tensor, right: Tensor) -> None:
    """`into += left' right` in the lower triangle, for a product that is symmetric.

    Args:
        into: `[d, d]`; strips reach over the diagonal, what is above them is left as it is.
        left: Rows `[n, d]`, each a multiple of the same row of `right`.
        right: Rows `[n, d]`.
    """
    if multiplies_rows_by_onednn(into):
        right_columns = right.T.contiguous()
        left_columns = right_columns if left is right else left.T.contiguous()
        for start, stop in _strips(len(into)):
            strip = multiply_transposed(left_columns[start:stop], right_columns[:stop])
            into[start:stop, :stop].add_(strip)
        return
    for start, stop in _strips(len(into)):
        into[start:stop, :stop].addmm_(left[:, start:stop].T, right[:, :stop])


def fill_upper(matrix: Tensor) -> None:
    """Copy the lower triangle, strip by strip, to the upper: the diagonal squares stay."""
    for start, stop in _strips(len(matrix)):
        matrix[:start, start:stop] = matrix[start:stop, :start].T


def _strips(width: int) -> list[tuple[int, int]]:
    step = max(SMALL, -(-width // COLUMN_BLOCKS))
    return [(start, min(start + step, width)) for start in range(0, width, step)]
