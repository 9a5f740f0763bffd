"""Statistics of calibration: sums over rows of inputs and of features paired with them."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.products import (
    add_lower_gram,
    add_product,
    factor_of,
    in_parts,
    mirror_lower,
    multiply_by_rows,
    quadratic,
)

MOST_ROWS = 4096
"""Rows multiplied at a time: products may copy them."""
FEW_ROWS = 1024
"""Fewer rows wait for further ones: a product of few is as fast as its addition to the sums."""
CONSTANT = 1e-6
"""Inputs with a smaller ratio of variance to mean square count as constant up to rounding."""


@dataclass
class Moments:
    """Sums over rows of inputs `x` and of paired features `y` (Eq. 13).

    Sums are not divided by the count, so that batches, samples and processes can be added up.

    Attributes:
        gram: `sum x x'`, `[d, d]`, not centred.
        cross: `sum y x'`, `[r, d]`.
        x: `sum x`, `[d]`.
        y: `sum y`, `[r]`.
        count: Number of rows, or the sum of their weights, a scalar.
        uncounted: Number of added rows that are not in `count` yet.
        multiplied: Number of rows in `gram` and `cross`.
        waiting: Rows, and their features, that are not in them yet.
        rows: All rows times the roots of their weights, `[n, d]`, if these are few after
            `mirrored`, else None.
    """

    gram: Float[Tensor, "d d"]
    cross: Float[Tensor, "r d"]
    x: Float[Tensor, " d"]
    y: Float[Tensor, " r"]
    count: Float[Tensor, ""]
    uncounted: int = field(default=0, init=False)
    multiplied: int = field(default=0, init=False)
    waiting: list[list[Tensor]] = field(default_factory=list, init=False)
    rows: Tensor | None = field(default=None, init=False)

    @classmethod
    def zeros(cls, inputs: int, outputs: int, example: Tensor) -> "Moments":
        """Return sums over no rows.

        Args:
            inputs: Width `d` of the inputs.
            outputs: Width `r` of the paired features.
            example: A tensor with the dtype and device of the sums.
        """
        shapes = (inputs, inputs), (outputs, inputs), (inputs,), (outputs,), ()
        return cls(*(example.new_zeros(shape) for shape in shapes))

    def tensors(self) -> list[Tensor]:
        """Return the sums. Sums of other processes may be added to them in place."""
        return [self.gram, self.cross, self.x, self.y, self.count]

    def add(self, x: Tensor, y: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Add rows in place. Call `mirrored` after the last ones.

        Args:
            x: Inputs, `[n, d]`.
            y: Paired features, `[n, r]`, or None for zeros.
            weights: Weights of the rows, `[n]`, or None for ones.
        """
        tensors = [x] if y is None else [x, y]
        if weights is None:
            self.uncounted += len(x)
        else:
            self.count.add_(weights.sum())
            tensors.append(weights.to(self.gram.dtype).sqrt())
        for parts in in_parts(MOST_ROWS, *tensors) if len(x) else ():
            waits = len(parts[0]) < FEW_ROWS
            # A copy, because the caller's tensors may change before the rows are multiplied. The
            # products with weights are copies.
            copy = waits and weights is None
            pair = [part.to(self.gram.dtype, copy=copy) for part in parts]
            root = None if weights is None else pair.pop()
            if root is not None:
                pair = [part.mul(root[:, None]) for part in pair]
            sums = [part.sum(0) if root is None else root @ part for part in pair]
            torch._foreach_add_([self.x, self.y][: len(sums)], sums)
            if waits:
                self.waiting.append(pair)
            else:
                self._multiply(pair)
        if sum(len(rows) for rows, *_ in self.waiting) >= FEW_ROWS:
            self._multiply(self._joined())

    def _joined(self) -> list[Tensor]:
        """Return the rows that wait, and their features, which then wait no more."""
        joined = [torch.cat(parts) for parts in zip(*self.waiting, strict=True)]
        self.waiting.clear()
        return joined

    def _multiply(self, pair: list[Tensor]) -> None:
        """Add products of rows, and of their features with them."""
        rows, *features = pair
        factor = factor_of(rows)
        add_lower_gram(self.gram, factor)
        for part in features:
            add_product(self.cross, factor_of(part), factor)
        self.multiplied += len(rows)

    def mirrored(self) -> "Moments":
        """Complete the Gram matrix, of which `add` forms the lower triangle, and the count."""
        if self.waiting:
            last = self._joined()
            if self.multiplied == 0:
                self.rows = self._if_few(last[0])
            self._multiply(last)
        mirror_lower(self.gram)
        self.count.add_(self.uncounted)
        self.uncounted = 0
        return self

    def squares(self, weight: Float[Tensor, "m d"]) -> Float[Tensor, ""]:
        """Return the sum of `|W x|^2` over rows."""
        if self.rows is None:
            return quadratic(weight, self.gram)
        return multiply_by_rows(self.rows, weight).square().sum()

    def times(self, weight: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
        """Return the sum of `W x x'` over rows, for fewer outputs than inputs."""
        if self.rows is None:
            return weight @ self.gram
        return (weight @ self.rows.T) @ self.rows

    def merge(self, other: "Moments", weight: Tensor) -> None:
        """Add other sums in place, each row with a weight."""
        for total, part in zip(self.tensors(), other.tensors(), strict=True):
            total.addcmul_(part.to(total.dtype), weight.to(total.dtype))
        self.rows = None

    def __iadd__(self, other: "Moments") -> "Moments":
        """Add other sums in place."""
        torch._foreach_add_(self.tensors(), other.tensors())
        if self.rows is None or other.rows is None:
            self.rows = None
        else:
            self.rows = self._if_few(torch.cat([self.rows, other.rows]))
        return self

    def _if_few(self, rows: Tensor) -> Tensor | None:
        """Return rows if products with them are faster than those with half of `gram`, or None."""
        return rows if 2 * len(rows) < len(self.gram) else None

    def means(self, *, centred: bool) -> "Moments":
        """Return means over rows. `count` does not change.

        Args:
            centred: Whether second moments are taken about the means. `x` and `y` are the means in
                either case.

        Returns:
            The means. `gram` is symmetric to the last bit.
        """
        x, y = self.x / self.count, self.y / self.count
        gram, cross = self.gram / self.count, self.cross / self.count
        if centred:
            gram.addr_(x, x, alpha=-1)
            cross.addr_(y, x, alpha=-1)
        # Vector instructions round `addr` otherwise than the scalars at the end of a row, and a
        # solve that reads one triangle would leave a residual in the other one.
        return Moments(mirror_lower(gram), cross, x, y, self.count)

    def varies(self, means: "Moments") -> Tensor:
        """Return whether inputs vary by more than rounding, given their means, a scalar."""
        square = self.gram.diagonal().mean() / self.count
        return means.gram.diagonal().mean() > CONSTANT * square

    def energy(self, *, centred: bool) -> Tensor:
        """Return the sum of `|x|^2` over rows, about the mean if centred, a scalar."""
        energy = self.gram.diagonal().sum()
        if not centred:
            return energy
        variation = energy - self.x.square().sum() / self.count.clamp_min(1)
        # A difference below this bound is rounding, as of a single row.
        return variation * (variation > CONSTANT * energy)

    def gram_norm(self) -> Tensor:
        """Return the Frobenius norm of the mean Gram matrix.

        torch's float32 norm of a large matrix is biased on CPUs. The norm of row norms is not.
        """
        rows = torch.linalg.vector_norm(self.gram, dim=-1)
        wide = None if rows.device.type == "mps" else torch.float64
        return torch.linalg.vector_norm(rows, dtype=wide).to(self.gram.dtype) / self.count

    def row_weight(self, eps: float) -> Tensor:
        """Return the weight of one row, `w_i / n` with `w_i = 1 / max(|G_i|_F, eps)` (Eq. 14)."""
        return (self.gram_norm().clamp_min(eps) * self.count).reciprocal()
