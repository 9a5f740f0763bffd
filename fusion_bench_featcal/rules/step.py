"""Targets of a step from an anchor, summed over tasks. `Paper` and `Plus` share them."""

import torch
from torch import Tensor

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.products import multiply
from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.rules.rule import Linear

_STRIP = 2048
"""Outputs per strip, which bounds the memory of intermediate matrices."""


class StepTargets:
    """Sums of `u = (W_i - W_a) x + b_i - b_a + alpha W_i (x_exp - x)`, the target of a sample.

    With `D_i = sum (x_exp - x) x'` the sum of `u x'` is, up to biases, `(W_i - W_a) (G_i + alpha
    D_i) + W_a alpha D_i`, which is zero if no step is needed. The last product is formed once, for
    the sum over tasks. If there are few outputs, rows come with `W_i` times the target's input, and
    the sum is `sum (u + W_a x) x' - W_a G`.

    Attributes:
        anchor: `W_a` and `b_a`.
        cross: `sum u x'` without biases, complete after `tensors` and `complete`, `[1, g, m, d]`.
        y: `sum u`, complete after `complete`, `[1, g, m]`.
    """

    def __init__(self, group: Group, anchor: Linear, alpha: float) -> None:
        """Start with no task."""
        self.anchor, self._alpha, self._dtype = anchor, alpha, group.dtype
        self._adds_anchor = group.has_few_outputs and alpha > 0
        self.cross = torch.zeros_like(anchor.weight)[None]
        self.y = torch.zeros_like(anchor.bias)[None]
        self._drift: Tensor | None = None

    def add(self, rows: Moments, expert: Linear, factor: Tensor) -> Tensor:
        """Add a task's targets, weighted by map, and return the unweighted sum of all entries.

        Args:
            rows: Sums over its rows, in one fold.
            expert: The expert's parameters.
            factor: Weight of a row, `[g]`.
        """
        alpha, count, x = self._alpha, rows.count[0][:, None], rows.x[0]
        if self._adds_anchor:
            y = rows.y[0] + (expert.bias - self.anchor.bias) * count
            self.y[0].addcmul_(y, factor[:, None])
            self.cross[0].addcmul_(rows.cross[0], factor[:, None, None])
            return rows.cross[0].sum()
        gram = rows.gram[0]
        if alpha:
            part = rows.cross[0] * (alpha * factor[:, None, None])
            self._drift = part if self._drift is None else self._drift.add_(part)
            gram = torch.add(gram, rows.cross[0], alpha=alpha)
        total = gram.new_zeros(())
        # By strips, because matrices of all outputs would be the largest of a run.
        for part in strips(self.y.shape[-1]):
            weight = expert.weight[:, part] - self.anchor.weight[:, part]
            cross, y = multiply(weight, gram, symmetric=not alpha), _times(weight, x)
            if alpha:
                y = y + alpha * _times(expert.weight[:, part], rows.y[0])
            y = y + (expert.bias - self.anchor.bias)[:, part] * count
            self.cross[0][:, part].addcmul_(cross, factor[:, None, None])
            self.y[0][:, part].addcmul_(y, factor[:, None])
            total += cross.sum()
        return total

    def tensors(self) -> list[Tensor]:
        """Return both sums. Sums of other processes may be added to them in place."""
        if self._drift is not None:
            with exact_products():  # the caller may allow TF32 or bfloat16
                self.cross[0].add_(multiply(self.anchor.weight, self._drift))
            self._drift = None
        return [self.cross, self.y]

    def complete(self, gram: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both completed sums, from the weighted sums of `x x'`, `[g, d, d]`, and of `x`."""
        if self._adds_anchor:
            self.cross[0].sub_(multiply(self.anchor.weight, gram, symmetric=True))
            self.y[0].sub_(_times(self.anchor.weight, x))
            self._adds_anchor = False
        return self.cross, self.y

    def moved(self, step: Tensor, x: Tensor, count: Tensor) -> Linear:
        """Return the anchor plus a step, and the bias given by the means (Eqs. 51 to 55).

        Weights are rounded to their storage dtype first, and the bias corrects for the rounding.

        Args:
            step: Change of the weights, `[g, m, d]`.
            x: Weighted sums of the inputs, `[g, d]`.
            count: Weighted number of rows plus the pull towards the anchor's bias, `[g]`.
        """
        wide = solve_dtype(step.device)
        weight = torch.empty_like(step, dtype=self._dtype)
        change = torch.empty_like(self.y[0], dtype=wide)
        for part in strips(step.shape[1]):
            anchor = self.anchor.weight[:, part].to(wide)
            weight[:, part] = anchor + step[:, part].to(wide)
            change[:, part] = _times(weight[:, part].to(wide) - anchor, x.to(wide))
        shift = (self.y[0].to(wide) - change) / count.to(wide)[:, None]
        return Linear(weight, self.anchor.bias.to(wide) + shift)


def strips(outputs: int) -> list[slice]:
    """Divide outputs into strips, whose matrices are in memory at once."""
    return [slice(start, start + _STRIP) for start in range(0, outputs, _STRIP)]


def _times(weight: Tensor, x: Tensor) -> Tensor:
    """Return `W x` for each map."""
    return (weight @ x[..., None])[..., 0]


def anchor_of(merged: Linear, base: Linear | None, rho: float) -> Linear:
    """Return `rho W_mer + (1 - rho) W_base`, the merged parameters at rho = 1 (Eq. 11).

    The result overwrites the merged parameters, as these matrices are among a run's largest.
    """
    if base is not None and rho != 1:
        for tensor, origin in ((merged.weight, base.weight), (merged.bias, base.bias)):
            tensor.sub_(origin).mul_(rho).add_(origin)
    return merged
