"""Matrix products that add to sums in place: no temporary of the sums' size."""

import torch
from torch import Tensor

from fusion_bench_featcal.engine.kernels import multiplies_rows_by_onednn, multiply_transposed
from fusion_bench_featcal.engine.precision import rounded

COLUMN_BLOCKS = 16
"""A gram is formed by at most so many strips of its lower triangle: 17/32 of the whole product."""

SMALL = 192
"""Narrower strips than this cost more than they save."""


def times_transposed(left: Tensor, right: Tensor) -> Tensor:
    """`left right'`.

    Args:
        left: `[m, n]`.
        right: `[d, n]`, of the same dtype.

    Returns:
        `[m, d]`.
    """
    if multiplies_rows_by_onednn(left):
        return multiply_transposed(left.contiguous(), right.contiguous())
    return left @ right.T


def columns_of(rows: Tensor) -> Tensor:
    """Rows `[n, d]` as the sums below take them, `[d, n]`: laid out anew only for oneDNN."""
    rows = rounded(rows)
    return rows.T.contiguous() if multiplies_rows_by_onednn(rows) else rows.T


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """`into += left right'`.

    Args:
        into: `[m, d]`.
        left: `[m, n]`, from `columns_of`.
        right: `[d, n]`, from `columns_of`.
    """
    if multiplies_rows_by_onednn(into):
        into.add_(multiply_transposed(left, right))
    elif left.dtype != into.dtype:
        into.add_(torch.mm(left, right.T, out_dtype=into.dtype))
    else:
        into.addmm_(left, right.T)


def add_lower_gram(into: Tensor, columns: Tensor) -> None:
    """`into += columns columns'` in the lower triangle.

    Args:
        into: `[d, d]`; strips reach over the diagonal, what is above them is left as it is.
        columns: `[d, n]`, from `columns_of`.
    """
    for start, stop in _strips(len(into)):
        add_product(into[start:stop, :stop], columns[start:stop], columns[:stop])


def _strips(width: int) -> list[tuple[int, int]]:
    step = max(SMALL, -(-width // COLUMN_BLOCKS))
    return [(start, min(start + step, width)) for start in range(0, width, step)]
