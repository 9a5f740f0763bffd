"""Statistics of calibration: sums over rows of inputs and of features paired with them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.products import (
    add_lower_gram,
    add_product,
    columns_of,
    mirror_lower,
)

MOST_ROWS = 4096
"""Rows multiplied at a time: products may copy them."""

LEAST_SHARE = 1e-3
"""The Gram matrix of one map counts as at least this share of the mean over all maps of a grouped
convolution. Otherwise channels that a task never uses would outweigh all other tasks."""


@dataclass(frozen=True)
class Moments:
    """Sums over rows of inputs `x` and of paired features `y` (Eq. 13).

    Sums are not divided by the count, so that batches and processes can be added up. The leading
    dimensions are folds `f` and maps `g`. A grouped convolution has one map for each group, any
    other module has one.

    Attributes:
        gram: `sum x x'`, `[f, g, d, d]`, not centred.
        cross: `sum y x'`, `[f, g, r, d]`.
        x: `sum x`, `[f, g, d]`.
        y: `sum y`, `[f, g, r]`.
        count: Number of rows, or the sum of their weights, `[f, g]`. The maps of one task have
            equal counts, merged tasks may weigh differently for each map.
    """

    gram: Float[Tensor, "f g d d"]
    cross: Float[Tensor, "f g r d"]
    x: Float[Tensor, "f g d"]
    y: Float[Tensor, "f g r"]
    count: Float[Tensor, "f g"]

    @classmethod
    def zeros(cls, folds: int, maps: int, inputs: int, outputs: int, like: Tensor) -> "Moments":
        """Return sums over no rows.

        Args:
            folds: Number of folds `f`.
            maps: Number of maps `g`.
            inputs: Width `d` of the inputs of one map.
            outputs: Width `r` of the paired features of one map.
            like: A tensor with the dtype and device of the sums.
        """
        lead = (folds, maps)
        shapes = (inputs, inputs), (outputs, inputs), (inputs,), (outputs,), ()
        return cls(*(like.new_zeros(*lead, *shape) for shape in shapes))

    def tensors(self) -> list[Tensor]:
        """Return the sums. Sums of other processes may be added to them in place."""
        return [self.gram, self.cross, self.x, self.y, self.count]

    def add(self, fold: int, x: Tensor, y: Tensor | None, weights: Tensor | None = None) -> None:
        """Add rows, in place. Only the lower triangle of a single map's Gram matrix is formed.

        Args:
            fold: The fold of the rows.
            x: Inputs, `[n, g * d]`.
            y: Paired features, `[n, g * r]`, or None for zeros.
            weights: Weight of each row, `[n]`, finite and > 0. By default all weigh 1.
        """
        for start in range(0, len(x), MOST_ROWS):
            part = slice(start, start + MOST_ROWS)
            of_part = None if weights is None else weights[part].to(self.gram.dtype)
            features = None if y is None else y[part].to(self.gram.dtype)
            self._add_part(fold, x[part].to(self.gram.dtype), features, of_part)

    def _add_part(self, fold: int, x: Tensor, y: Tensor | None, weights: Tensor | None) -> None:
        self.count[fold] += len(x) if weights is None else weights.sum()
        for total, rows in ((self.x[fold], x), (self.y[fold], y)):
            if rows is not None:
                total += (rows.sum(0) if weights is None else weights @ rows).view_as(total)
        if weights is not None:
            # A root on both sides keeps the Gram matrix positive semi-definite after rounding.
            x = x * weights.sqrt()[:, None]
            y = None if y is None else y * weights.sqrt()[:, None]
        if self.gram.shape[1] > 1:
            self._add_maps(fold, x, y)
            return
        columns = columns_of(x)
        add_lower_gram(self.gram[fold, 0], columns)
        if y is not None:
            add_product(self.cross[fold, 0], columns_of(y), columns)

    def _add_maps(self, fold: int, x: Tensor, y: Tensor | None) -> None:
        """Add rows of several maps with small matrices."""
        maps = self.gram.shape[1]
        inputs = x.view(len(x), maps, -1).transpose(0, 1).contiguous()
        self.gram[fold].baddbmm_(inputs.mT, inputs)
        if y is not None:
            features = y.view(len(y), maps, -1).transpose(0, 1).contiguous()
            self.cross[fold].baddbmm_(features.mT, inputs)

    def mirrored(self) -> "Moments":
        """Complete the Gram matrices in place, after all rows were added."""
        if self.gram.shape[1] == 1:
            for gram in self.gram[:, 0]:
                mirror_lower(gram)
        return self

    def merge(self, other: "Moments", weight: Float[Tensor, " g"]) -> None:
        """Add other sums in place, weighted by map."""
        for total, part in zip(self.tensors(), other.tensors(), strict=True):
            factor = weight.to(total.dtype).view(-1, *[1] * (total.ndim - 2))
            total.addcmul_(part.to(total.dtype), factor)

    def fold(self, number: int) -> "Moments":
        """Return the sums over one fold."""
        return Moments(*(tensor[number : number + 1] for tensor in self.tensors()))

    def without(self, part: "Moments") -> "Moments":
        """Return the sums over all rows that are not in `part`."""
        pairs = zip(self.tensors(), part.tensors(), strict=True)
        return Moments(*(total - of_part for total, of_part in pairs))

    def total(self) -> "Moments":
        """Return the sums over all folds, as one fold."""
        if len(self.count) == 1:
            return self
        return Moments(*(tensor.sum(0, keepdim=True) for tensor in self.tensors()))

    def means(self, *, centred: bool) -> "Moments":
        """Return means over rows. `count` does not change.

        Args:
            centred: Whether second moments are taken about the means. `x` and `y` are the means in
                either case.
        """
        count = self.count[..., None]
        x, y = self.x / count, self.y / count
        gram, cross = self.gram / count[..., None], self.cross / count[..., None]
        if centred:
            gram.addcmul_(x[..., :, None], x[..., None, :], value=-1)
            cross.addcmul_(y[..., :, None], x[..., None, :], value=-1)
        return Moments(gram, cross, x, y, self.count)

    def variances(self, *, centred: bool) -> Float[Tensor, "f g d"]:
        """Return the mean square of each input, about its mean if centred."""
        count = self.count[..., None]
        squares = self.gram.diagonal(dim1=-2, dim2=-1) / count
        return squares - (self.x / count).square() if centred else squares

    def without_features(self) -> "Moments":
        """Return the sums over the inputs alone."""
        return Moments(self.gram, self.cross[..., :0, :], self.x, self.y[..., :0], self.count)

    def gram_norms(self) -> Float[Tensor, " g"]:
        """Return the Frobenius norm of each map's mean Gram matrix, over all rows.

        torch's float32 norm of a large matrix is biased on CPUs. The norm of row norms is not.
        """
        rows = torch.linalg.vector_norm(self.total().gram[0], dim=-1)
        wide = rows if rows.device.type == "mps" else rows.double()
        return torch.linalg.vector_norm(wide, dim=-1).to(self.gram.dtype) / self.count.sum(0)

    def task_weights(self, eps: float) -> Float[Tensor, " g"]:
        """Return `w_i = 1 / max(|G_i|_F, eps)` of each map (Eq. 14)."""
        norms = self.gram_norms()
        return 1 / norms.clamp_min(LEAST_SHARE * norms.mean()).clamp_min(eps)
