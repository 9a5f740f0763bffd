"""Targets of a step from an anchor, summed over tasks: the part that both rules share."""

import torch
from torch import Tensor

from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.products import multiply
from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.rules.rule import Linear


class StepTargets:
    """Sums of `u = (W_i - W_a) x + b_i - b_a + alpha W_i (x_exp - x)`, the target of a sample.

    With `D_i = sum (x_exp - x) x'` the sum of `u x'` is, but for biases,
    `(W_i - W_a) (G_i + alpha D_i) + W_a alpha D_i`: zero where nothing is to be done. The last
    product is formed once, for the sum over tasks.

    Attributes:
        anchor: `W_a` and `b_a`.
        cross: `sum u x'` without biases, complete after `tensors`, `[1, g, m, d]`.
        y: `sum u`, `[1, g, m]`.
    """

    def __init__(self, group: Group, anchor: Linear, alpha: float) -> None:
        """Start with no task."""
        self.anchor, self._alpha, self._dtype = anchor, alpha, group.dtype
        self._has_few_outputs = group.has_few_outputs
        self.cross = torch.zeros_like(anchor.weight)[None]
        self.y = torch.zeros_like(anchor.bias)[None]
        self._drift: Tensor | None = None

    def add(self, rows: Moments, expert: Linear, factor: Tensor) -> Tensor:
        """Add a task's targets, weighted by map, and return its `sum u x'` unweighted.

        Args:
            rows: Sums over its rows, in one fold.
            expert: The expert's parameters.
            factor: Weight of a row, `[g]`.
        """
        alpha, step, count = self._alpha, expert.minus(self.anchor), rows.count[0][:, None]
        gram, drift, x, y = rows.gram[0], rows.cross[0], rows.x[0], alpha * rows.y[0]
        if self._has_few_outputs:
            cross = multiply(step.weight, gram, symmetric=True).add_(drift, alpha=alpha)
        else:
            cross = multiply(step.weight, torch.add(gram, drift, alpha=alpha))
            y = (expert.weight @ y[..., None])[..., 0]
            part = drift * (alpha * factor[:, None, None])
            self._drift = part if self._drift is None else self._drift.add_(part)
        y = y + (step.weight @ x[..., None])[..., 0] + step.bias * count
        self.cross[0].addcmul_(cross, factor[:, None, None])
        self.y[0].addcmul_(y, factor[:, None])
        return cross

    def tensors(self) -> list[Tensor]:
        """Return both sums, complete."""
        if self._drift is not None:
            self.cross[0].add_(multiply(self.anchor.weight, self._drift))
            self._drift = None
        return [self.cross, self.y]

    def moved(self, step: Tensor, x: Tensor, count: Tensor) -> Linear:
        """Return the anchor plus a step, and the bias that means leave (Eqs. 51 to 55).

        Weights are rounded as they will be stored: biases make up for that.

        Args:
            step: Change of the weights, `[g, m, d]`.
            x: Weighted sums of the inputs, `[g, d]`.
            count: Weighted number of rows and the pull towards the anchor's bias, `[g]`.
        """
        wide = solve_dtype(step.device)
        anchor = self.anchor.to(wide)
        weight = (anchor.weight + step.to(wide)).to(self._dtype).to(wide)
        change = ((weight - anchor.weight) @ x.to(wide)[..., None])[..., 0]
        shift = (self.y[0].to(wide) - change) / count.to(wide)[:, None]
        return Linear(weight, anchor.bias + shift)


def anchor_of(merged: Linear, base: Linear | None, rho: float) -> Linear:
    """Return `rho W_mer + (1 - rho) W_base`, the merged parameters at rho = 1 (Eq. 11)."""
    if base is None or rho == 1:
        return merged
    step = merged.minus(base)
    return Linear(base.weight + rho * step.weight, base.bias + rho * step.bias)
