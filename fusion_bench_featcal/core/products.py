"""Products that are added to sums in place, and symmetric matrices built from one triangle."""

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.kernels import multiplies_rows_by_onednn, onednn_linear

COLUMN_BLOCKS = 16
"""Largest number of strips of a Gram matrix's lower triangle. 16 are 17/32 of the product."""

SMALL = 192
"""Narrower strips than this cost more than they save. A tile of this size and its transpose fit
the second-level cache together."""

QUADRATIC_BLOCKS = 8
"""Largest number of strips of a quadratic form, which read narrower slices of a weight each."""

LEAST_WORK = 2**33
"""Multiplications in a strip on a GPU. They take about 0.4 ms in float32 on a data centre's GPU.
Fewer cost more in starts of operations by the host, which bounds small models, than they save."""

LARGEST_PRODUCT = 2**24
"""Entries of a product that is in memory by itself before it is added to a sum."""


def in_parts(most: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors of equally many rows, at most `most` rows of each at a time.

    Tensors that fit are yielded as they are, because a GPU waits for the host to create views.
    """
    if len(tensors[0]) <= most:
        yield tensors
    else:
        yield from zip(*(tensor.split(most) for tensor in tensors), strict=True)


def multiply(
    weight: Float[Tensor, "m d"], moment: Float[Tensor, "d k"], *, symmetric: bool = False
) -> Float[Tensor, "m k"]:
    """Return `W M`. A symmetric moment need not be transposed for oneDNN."""
    if not multiplies_rows_by_onednn(weight):
        return weight @ moment
    return multiply_by_rows(weight, moment if symmetric else moment.T.contiguous())


def multiply_by_rows(first: Float[Tensor, "m n"], second: Float[Tensor, "d n"]) -> Tensor:
    """Return `A B'`, `[m, d]`."""
    if not multiplies_rows_by_onednn(first):
        return first @ second.T
    return onednn_linear(first.contiguous(), second)


def factor_of(rows: Tensor) -> Tensor:
    """Return rows `[n, d]` in the layout of the sums below: a copy `[d, n]` for oneDNN."""
    return rows.T.contiguous() if multiplies_rows_by_onednn(rows) else rows


def add_product(matrix: Tensor, first: Tensor, second: Tensor, weight: float = 1.0) -> None:
    """Compute `matrix += weight first' second`.

    Args:
        matrix: `[m, d]`.
        first: Rows `[n, m]` as returned by `factor_of`.
        second: Rows `[n, d]` as returned by `factor_of`.
        weight: A factor.
    """
    if multiplies_rows_by_onednn(matrix):
        # oneDNN does not add to a matrix. Its product is a further matrix, which strips keep small.
        for total, part in in_parts(max(1, LARGEST_PRODUCT // matrix.shape[1]), matrix, first):
            total.add_(onednn_linear(part, second), alpha=weight)
    else:
        matrix.addmm_(first.T, second, alpha=weight)


def add_lower_gram(matrix: Tensor, rows: Tensor) -> None:
    """Compute `matrix += rows' rows` in the lower triangle.

    Args:
        matrix: `[d, d]`. Strips also write some entries above the diagonal. The others do not
            change.
        rows: `[n, d]` as returned by `factor_of`.
    """
    width = len(matrix)
    step = strip_of(width, rows)
    if width <= step:
        add_product(matrix, rows, rows)
        return
    columns = 0 if multiplies_rows_by_onednn(matrix) else 1
    for start in range(0, width, step):
        stop = min(start + step, width)
        strip = rows.narrow(columns, start, stop - start)
        add_product(matrix[start:stop, :stop], strip, rows.narrow(columns, 0, stop))


def gram_of(rows: Float[Tensor, "n d"]) -> Float[Tensor, "d d"]:
    """Return `rows' rows`, computed in its lower triangle."""
    gram = rows.new_zeros(rows.shape[1], rows.shape[1])
    add_lower_gram(gram, factor_of(rows))
    return mirror_lower(gram)


def strip_of(width: int, rows: Tensor, blocks: int = COLUMN_BLOCKS) -> int:
    """Return the width of strips in which a symmetric product of some width is computed.

    Args:
        width: Width of the symmetric matrix.
        rows: The matrix that is multiplied by it or with itself.
        blocks: Largest number of strips.
    """
    step = max(SMALL, -(-width // blocks))
    return step if rows.is_cpu else max(step, LEAST_WORK // max(rows.numel(), 1))


def quadratic(weight: Float[Tensor, "m d"], moment: Float[Tensor, "d d"]) -> Float[Tensor, ""]:
    """Return the sum of `(W M) * W` for a symmetric moment.

    Strips of its lower triangle are multiplied. Their squares on the diagonal, which hold both
    triangles, are halved, and the sum is doubled.
    """
    width, total = len(moment), weight.new_zeros(())
    step = strip_of(width, weight, QUADRATIC_BLOCKS)
    for start in range(0, width, step):
        stop = min(start + step, width)
        strip = moment[start:stop, :stop].clone()
        strip[:, start:].mul_(0.5)
        total += (multiply_by_rows(weight[:, :stop], strip) * weight[:, start:stop]).sum()
    return 2 * total


def mirror_lower(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Copy the lower triangle of a matrix to its upper triangle, in place.

    On the CPU this is done by tiles: torch transposes a contiguous tile fast, but a strip of a
    larger matrix slowly. On a GPU strips only bound the memory of copies.

    Args:
        matrix: `[d, d]`, exactly symmetric afterwards.

    Returns:
        The matrix.
    """
    width = len(matrix)
    strip = SMALL if matrix.is_cpu else max(SMALL, LARGEST_PRODUCT // max(width, 1))
    tile = SMALL if matrix.is_cpu else width
    for start in range(0, width, strip):
        stop = start + strip
        corner = matrix[start:stop, start:stop] if strip < width else matrix
        corner.tril_().add_(corner.tril(-1).T)
        for column in range(0, start, tile):
            right = min(column + tile, start)
            below = matrix[start:stop, column:right].contiguous()
            matrix[column:right, start:stop] = below.T.contiguous()
    return matrix
