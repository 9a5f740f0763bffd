"""Targets of a step from an anchor, summed over tasks. `Paper` and `Plus` share them."""

import torch
from torch import Tensor

from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.products import in_parts, multiply
from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.rules.rule import Linear

_STRIP, _ENTRIES = 2048, 2**22
"""Outputs per strip, which bounds the memory of intermediate matrices. If there are fewer inputs,
strips with this number of entries are no larger than those of other modules."""


class Targets:
    """Weighted sums of `x x'`, `x`, `u x'` and `u`, with `u` the target of a step from an anchor.

        u = (W_i - W_a) x + b_i - b_a + alpha W_i (x_exp - x)

    With `D_i = sum (x_exp - x) x'` the sum of `u x'` is, up to biases, `(W_i - W_a) (G_i + alpha
    D_i) + W_a alpha D_i`, which is zero if no step is needed. The last product is formed once, for
    the sum over tasks. If there are few outputs, rows come with `W_i` times the target's input, and
    the sum is `sum (u + W_a x) x' - W_a G`.

    Attributes:
        anchor: `W_a` and `b_a`.
        sums: The sums, with `u` as `y` after `finalize`. `cross` has no biases.
    """

    def __init__(self, group: Group, anchor: Linear, alpha: float) -> None:
        """Start with no task."""
        self.anchor, self._alpha, self._dtype = anchor, alpha, group.dtype
        self._adds_anchor = group.has_few_outputs and alpha > 0
        outputs, inputs = anchor.weight.shape
        self.sums = Moments.zeros(inputs, outputs, anchor.weight)
        sums_drift = alpha > 0 and not self._adds_anchor
        self._drift = anchor.weight.new_zeros(inputs, inputs) if sums_drift else None

    def add(self, rows: Moments, expert: Linear, weight: Tensor) -> None:
        """Add a task's targets.

        Args:
            rows: Sums over its rows.
            expert: The expert's parameters.
            weight: Weight of a row, a scalar.
        """
        sums, alpha, gram = self.sums, self._alpha, rows.gram
        sums.gram.addcmul_(gram, weight)
        sums.x.addcmul_(rows.x, weight)
        sums.count.addcmul_(rows.count, weight)
        sums.y.addcmul_(expert.bias - self.anchor.bias, rows.count * weight)
        if self._adds_anchor:
            sums.y.addcmul_(rows.y, weight)
            sums.cross.addcmul_(rows.cross, weight)
            return
        if self._drift is not None:
            self._drift.addcmul_(rows.cross, alpha * weight)
            gram = torch.add(gram, rows.cross, alpha=alpha)
        # By strips, because matrices of all outputs would be the largest of a run.
        outputs = max(_STRIP, _ENTRIES // len(gram))
        parts = in_parts(outputs, expert.weight, self.anchor.weight, sums.y, sums.cross)
        for expert_weight, anchor_weight, sum_y, sum_cross in parts:
            step = expert_weight - anchor_weight
            y = step @ rows.x
            if alpha:
                y = y + alpha * (expert_weight @ rows.y)
            sum_y.addcmul_(y, weight)
            sum_cross.addcmul_(multiply(step, gram, symmetric=not alpha), weight)

    def tensors(self) -> list[Tensor]:
        """Return the sums. Sums of other processes may be added to them in place."""
        return [*self.sums.tensors(), *([] if self._drift is None else [self._drift])]

    def finalize(self) -> Moments:
        """Return the sums over all tasks."""
        # `W_a alpha D` and `W_a G` are linear in the sums over tasks: one product of `[m, d]` and
        # `[d, d]` per group in place of one per task. A second call must not add them again.
        sums, weight = self.sums, self.anchor.weight
        if self._drift is not None:
            sums.cross.add_(multiply(weight, self._drift))
            self._drift = None
        if self._adds_anchor:
            sums.cross.sub_(multiply(weight, sums.gram, symmetric=True))
            sums.y.sub_(weight @ sums.x)
            self._adds_anchor = False
        return sums

    def moved(self, step: Tensor, pull: float = 0.0) -> Linear:
        """Return the anchor plus a step, and the bias given by the means (Eqs. 51 to 55).

        Weights are rounded to their storage dtype first, and the bias corrects for the rounding.

        Args:
            step: Change of the weights, `[m, d]`.
            pull: Pull towards the anchor's bias, in rows.
        """
        wide, sums = solve_dtype(step.device), self.sums
        weight = step.new_empty(step.shape, dtype=self._dtype)
        change = torch.empty_like(sums.y, dtype=wide)
        mean = sums.x.to(wide)
        for old, move, new, moved in in_parts(_STRIP, self.anchor.weight, step, weight, change):
            anchor = old.to(wide)
            new.copy_(anchor + move.to(wide))
            torch.mv(new.to(wide) - anchor, mean, out=moved)
        shift = (sums.y.to(wide) - change) / (sums.count.to(wide) + pull)
        return Linear(weight, self.anchor.bias.to(wide) + shift)


def anchor_of(merged: Linear, base: Linear | None, rho: float) -> Linear:
    """Return `rho W_mer + (1 - rho) W_base`, the merged parameters at rho = 1 (Eq. 11).

    The result overwrites the merged parameters, as these matrices are among a run's largest.
    """
    if base is not None and rho != 1:
        for tensor, origin in zip(merged, base, strict=True):
            tensor.sub_(origin).mul_(rho).add_(origin)
    return merged
