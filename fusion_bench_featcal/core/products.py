"""Products that add to sums in place, and symmetric matrices of which one half is formed."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.float32_products import EXACT, multiplying_in
from fusion_bench_featcal.core.kernels import multiplies_rows_by_onednn, multiply_transposed

FLOAT32, TF32, BFLOAT16 = "float32", "tf32", "bfloat16"

COLUMN_BLOCKS = 16
"""A gram is formed by at most so many strips of its lower triangle: 17/32 of the whole product."""

SMALL = 192
"""Narrower strips than this cost more than they save; a tile of this size and its transpose fit
the second-level cache together."""

_ADDS_IN_FLOAT32 = torch.__version__ >= "2.8" and torch.version.hip is None

_sums: ContextVar[str] = ContextVar("sums", default=FLOAT32)


@contextmanager
def summing_in(precision: str, device: torch.device) -> Iterator[None]:
    """Context in which sums over rows multiply float32 numbers as `sums_precision` asks.

    Products are always added up in float32 or better.

    Args:
        precision: `tf32`, which only GPUs have; `bfloat16`: rows are rounded; else exact.
        device: Device of the sums.
    """
    token = _sums.set(precision)
    try:
        with multiplying_in(TF32 if precision == TF32 and device.type == "cuda" else EXACT):
            yield
    finally:
        _sums.reset(token)


def rounded(rows: Tensor) -> Tensor:
    """Rows as sums multiply them in this context.

    In bfloat16 on an NVIDIA GPU, whose products then add up in float32 (torch 2.8 and newer);
    elsewhere with bfloat16's values in float32, which gives the same.
    """
    if _sums.get() != BFLOAT16 or rows.dtype != torch.float32:
        return rows
    short = rows.bfloat16()
    return short if rows.is_cuda and _ADDS_IN_FLOAT32 else short.float()


def multiply(
    weight: Float[Tensor, "g m d"], moment: Float[Tensor, "g d k"], *, symmetric: bool = False
) -> Float[Tensor, "g m k"]:
    """Return `W M` for each map. A symmetric moment need not be transposed for oneDNN."""
    if len(weight) > 1 or not multiplies_rows_by_onednn(weight):
        return weight @ moment
    right = moment[0] if symmetric else moment[0].T.contiguous()
    return multiply_transposed(weight[0].contiguous(), right)[None]


def columns_of(rows: Tensor) -> Tensor:
    """Rows `[n, d]` as the sums below take them, `[d, n]`: laid out anew only for oneDNN."""
    rows = rounded(rows)
    return rows.T.contiguous() if multiplies_rows_by_onednn(rows) else rows.T


def add_product(into: Tensor, left: Tensor, right: Tensor, weight: float = 1.0) -> None:
    """`into += weight left right'`.

    Args:
        into: `[m, d]`.
        left: `[m, n]`, from `columns_of`.
        right: `[d, n]`, from `columns_of`.
        weight: A factor.
    """
    if multiplies_rows_by_onednn(into):
        into.add_(multiply_transposed(left, right), alpha=weight)
    elif left.dtype != into.dtype:
        into.add_(torch.mm(left, right.T, out_dtype=into.dtype), alpha=weight)
    else:
        into.addmm_(left, right.T, alpha=weight)


def add_lower_gram(into: Tensor, columns: Tensor, weight: float = 1.0) -> None:
    """`into += weight columns columns'` in the lower triangle.

    Args:
        into: `[d, d]`; strips reach over the diagonal, what is above them is left as it is.
        columns: `[d, n]`, from `columns_of`.
        weight: A factor.
    """
    for start, stop in _strips(len(into)):
        add_product(into[start:stop, :stop], columns[start:stop], columns[:stop], weight)


def _strips(width: int) -> list[tuple[int, int]]:
    step = max(SMALL, -(-width // COLUMN_BLOCKS))
    return [(start, min(start + step, width)) for start in range(0, width, step)]


def mirror_lower(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Copy what is below the diagonal to what is above it, in place.

    On the CPU tile by tile: torch copies a transposed tile of its own fast, and a transposed strip
    of a larger matrix slowly.

    Args:
        matrix: `[d, d]`; afterwards exactly symmetric.

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
