"""FeatCal as published."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.products import times_transposed
from fusion_bench_featcal.core.solve import SINGLE_RIDGE, solve_dtype, solve_ridge
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.rules.norms import NormSums
from fusion_bench_featcal.rules.rule import GroupSums, Linear, Solved, anchor_of, stored

MAX_ROUNDING = 1e-3
"""Largest accepted float32 rounding of the normal equations, relative to lambda."""


@dataclass(frozen=True)
class Paper:
    """FeatCal as published: all modules of a block from one look, one ridge, a mixed target.

    Attributes:
        ridge_lambda: Ridge strength lambda, relative to Gram matrices of norm 1 (Eq. 15).
        mix_alpha: Share alpha of the expert's input in the target's input (Eq. 10).
        anchor_rho: rho of the anchor `rho W_mer + (1 - rho) W_base` (Eq. 11).
        eps: Stabiliser of the matrix and least norm of a Gram matrix.
        calibrate_bias: Whether biases of linear modules change (Eqs. 51 to 55).
        calibrate_norm: Whether gains and shifts of norms change (Eqs. 56 to 59).
    """

    ridge_lambda: float = 0.05
    mix_alpha: float = 0.3
    anchor_rho: float = 2.0
    eps: float = 1e-8
    calibrate_bias: bool = True
    calibrate_norm: bool = True
    folds: ClassVar[int] = 1
    notes_outputs: ClassVar[bool] = False
    reads_closing_rows: ClassVar[bool] = False
    weighs_trust: ClassVar[bool] = False

    @property
    def runs_experts(self) -> bool:
        """Return whether the target needs the experts' features."""
        return self.mix_alpha > 0

    @property
    def reads_base(self) -> bool:
        """Return whether anchors are made of the base model."""
        return self.anchor_rho != 1

    @property
    def needs_base(self) -> bool:
        """Return the same: there is no anchor without it."""
        return self.reads_base

    @property
    def remedy(self) -> str:
        """Return what to change where a system has no solution."""
        return (
            f"Raise method.ridge_lambda (now {self.ridge_lambda}) or use more samples "
            "(method.samples_per_task)"
        )

    def turns(self, groups: Sequence[Any]) -> list[Sequence[Any]]:
        """Solve all modules from one look at the samples.

        Statistics of BatchNorm change before, as merged ones fit no features, and behind.
        """
        statistics = [[group] for group in groups if group.kind == "batch_norm"]
        return [*statistics, [g for g in groups if g.kind != "batch_norm"], *statistics]

    def sums(self, group: Group, merged: Linear, base: Linear | None) -> GroupSums:
        """Return empty sums relative to the anchor."""
        anchor = anchor_of(merged, base, self.anchor_rho)
        return NormSums(self, anchor) if group.kind == "norm" else PaperSums(self, group, anchor)

    def dtype(self, tasks: int, device: torch.device) -> torch.dtype:
        """Return float64 where float32 rounding would reach the update through a small lambda."""
        rounding = torch.finfo(torch.float32).eps * tasks
        is_small = self.ridge_lambda < max(SINGLE_RIDGE, rounding / MAX_ROUNDING)
        return solve_dtype(device) if is_small else torch.float32


class PaperSums:
    """Sums for the step from the anchor (Eqs. 13 to 17, 51 to 55).

    With `D_i = mean (x_exp - x) x'` a task's right side, relative to the anchor, is
    `W_i C_i - W_anc G_i = (W_i - W_anc) (G_i + alpha D_i) + W_anc alpha D_i`: zero where nothing is
    to be done. The last product is formed once, for the sum over tasks.
    """

    def __init__(self, rule: Paper, group: Group, anchor: Linear) -> None:
        """Start with no task."""
        self._rule, self._anchor, self._has_few_outputs = rule, anchor, group.has_few_outputs
        maps, outputs, inputs = anchor.weight.shape
        self.rows = Moments.zeros(1, maps, inputs, outputs, anchor.weight)
        self._drift: Tensor | None = None
        self._dtype = group.dtype

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        self._add_anchor()
        return self.rows.tensors()

    def add(self, task: str, rows: Moments, expert: Linear) -> dict[str, Tensor]:
        """Add a task's means, weighted by `1 / |G_i|` (Eq. 14)."""
        alpha, step = self._rule.mix_alpha, expert.minus(self._anchor)
        weight = self.weights_of(rows)
        gram, x = rows.gram[0], rows.x[0]
        if self._has_few_outputs:
            cross = product(step.weight, gram).add_(rows.cross[0], alpha=alpha)
            y = alpha * rows.y[0]
        else:
            cross = product(step.weight, torch.add(gram, rows.cross[0], alpha=alpha))
            y = alpha * (expert.weight @ rows.y[0][..., None])[..., 0]
            per_row = (weight / rows.count[0])[:, None, None]
            part = (alpha * per_row) * rows.cross[0]
            self._drift = part if self._drift is None else self._drift.add_(part)
        y = y + (step.weight @ x[..., None])[..., 0] + step.bias * rows.count[0][:, None]
        target = Moments(rows.gram, cross[None], rows.x, y[None], rows.count)
        self.rows.merge(target, weight / rows.count[0])
        return {"norm": rows.gram_norms().mean(), "cross": cross.sum()}

    def weights_of(self, rows: Moments) -> Tensor:
        """Return a task's weight `1 / |G_i|` by map, `[g]` (Eq. 14)."""
        return rows.task_weights(self._rule.eps)

    def solve(self) -> Solved:
        """Solve for the step from the anchor (Eq. 17); the bias follows from the means."""
        self._add_anchor()
        rule, anchor = self._rule, self._anchor
        right = self.rows.cross[0] - rule.eps * anchor.weight
        gram, rounding = self.rows.gram[0], rounding_of(self._dtype)
        rounding = max(rounding, torch.finfo(right.dtype).eps)
        solution = solve_ridge(gram, right, rule.ridge_lambda + rule.eps, rounding=rounding)
        wide = solve_dtype(right.device)
        weight = stored(anchor.weight.to(wide) + solution.step.to(wide), self._dtype)
        step, x = weight - anchor.weight.to(wide), self.rows.x[0].to(wide)
        shift = self.rows.y[0].to(wide) - (step @ x[..., None])[..., 0]
        shift = shift / (self.rows.count[0].to(wide) + rule.ridge_lambda)[:, None]
        solved = Linear(weight, anchor.bias.to(wide) + shift)
        return Solved(solved, solution.residual, solution.condition)

    def _add_anchor(self) -> None:
        """Add once what the anchor contributes to the right side, over all tasks."""
        if self._drift is not None:
            self.rows.cross[0].add_(product(self._anchor.weight, self._drift))
            self._drift = None


def rounding_of(features: torch.dtype) -> float:
    """Return the rounding of features in a Gram matrix, relative to its diagonal.

    Float32 features fill a direction that they lack with the square of their rounding, which
    float64 sums resolve. Half-precision features are taken as the numbers they are.
    """
    return 0.0 if features.itemsize < 4 else torch.finfo(features).eps ** 2


def product(weight: Tensor, moment: Tensor) -> Tensor:
    """Return `W M` for each map, through the faster library for a single one."""
    if len(weight) > 1:
        return weight @ moment
    return times_transposed(weight[0], moment[0].T)[None]
