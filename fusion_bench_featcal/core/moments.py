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
)

MOST_ROWS = 4096
"""Rows multiplied at a time: products may copy them."""
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
    """

    gram: Float[Tensor, "d d"]
    cross: Float[Tensor, "r d"]
    x: Float[Tensor, " d"]
    y: Float[Tensor, " r"]
    count: Float[Tensor, ""]
    uncounted: int = field(default=0, init=False)

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
            rows, *features = (part.to(self.gram.dtype) for part in parts)
            root = None if weights is None else features.pop()
            if root is not None:
                rows, *features = (part.mul(root[:, None]) for part in (rows, *features))
            factor = factor_of(rows)
            add_lower_gram(self.gram, factor)
            for part in features:
                add_product(self.cross, factor_of(part), factor)
            sums = [part.sum(0) if root is None else root @ part for part in (rows, *features)]
            torch._foreach_add_([self.x, self.y][: len(sums)], sums)

    def mirrored(self) -> "Moments":
        """Complete the Gram matrix, of which `add` forms the lower triangle, and the count."""
        mirror_lower(self.gram)
        self.count.add_(self.uncounted)
        self.uncounted = 0
        return self

    def merge(self, other: "Moments", weight: Tensor) -> None:
        """Add other sums in place, each row with a weight."""
        for total, part in zip(self.tensors(), other.tensors(), strict=True):
            total.addcmul_(part.to(total.dtype), weight.to(total.dtype))

    def __iadd__(self, other: "Moments") -> "Moments":
        """Add other sums in place."""
        torch._foreach_add_(self.tensors(), other.tensors())
        return self

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
        if centred:
            energy = energy - self.x.square().sum() / self.count.clamp_min(1)
        return energy.clamp_min(0)

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
