"""FeatCal+: modules in their order, rows out of the experts' weights, one ridge by held-out error.

The mathematics is in docs/plus.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.ridge import NO_CHANGE, choose_ridge
from fusion_bench_featcal.core.solve import PROBES, random_signs, solve_dtype, solve_ridge
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.rules.rule import GroupSums, Linear, Solved, stored

EPS = 1e-8
"""Least norm of a Gram matrix."""

CONSTANT = 1e-6
"""Inputs whose variance is a smaller share of their mean square are constant but for rounding."""


@dataclass(frozen=True)
class Plus:
    """FeatCal+: groups of modules one after another, each with the ridge of least held-out error.

    Attributes:
        gamma: Energy of the rows out of an expert's weights relative to that of its samples, where
            these are many and familiar (`trust.py`); 0: samples alone.
        gammas: The same by task, as it is found for the samples; tasks that are not named have
            `gamma`.
        task_weights: Factors of the tasks' weights; tasks that are not named have 1.
        calibrate_bias: Whether biases change.
    """

    gamma: float = 2.0
    gammas: Mapping[str, float] = field(default_factory=dict)
    task_weights: Mapping[str, float] = field(default_factory=dict)
    calibrate_bias: bool = True
    calibrate_norm: ClassVar[bool] = False
    folds: ClassVar[int] = 4
    runs_experts: ClassVar[bool] = True
    notes_outputs: ClassVar[bool] = True
    remedy: ClassVar[str] = "Use more samples (method.samples_per_task)"
    reads_closing_rows: ClassVar[bool] = True
    needs_base: ClassVar[bool] = False

    @property
    def reads_base(self) -> bool:
        """Return whether rows out of weights join the samples."""
        return self.gamma > 0

    @property
    def weighs_trust(self) -> bool:
        """Return whether these rows count by trust in the samples."""
        return self.gamma > 0 and not self.gammas

    def turns(self, groups: Sequence[Any]) -> list[Sequence[Any]]:
        """Solve one group after another: later ones receive what earlier ones give now."""
        return [[group] for group in groups]

    def sums(self, group: Group, merged: Linear, base: Linear | None) -> GroupSums:
        """Return empty sums relative to the merged modules."""
        return PlusSums(self, group, merged, base)

    def dtype(self, tasks: int, device: torch.device) -> torch.dtype:
        """Return float32: ridges are relative to the inputs, and small ones are solved wider."""
        return torch.float32


class PlusSums:
    """Sums for the step from the merged modules, `E = C (G + l s I)^-1`.

    The target of a sample is what the expert's module gives, `u = W_i x_exp + b_i - W x - b`.
    Fine-tuning adds multiples of inputs to a weight. With `tau_i = W_i - W_base`, stacked over the
    group, `tau_i' tau_i` is therefore a second moment of what expert i was trained on. It joins the
    samples in every fold as rows of mean zero that ask for the expert's own answer:

        A_i = gamma_i n_i tr(cov_i) tau_i' tau_i / |tau_i|_F^2    gamma 1: the energy of the samples
        G   = sum_i w_i (n_i cov_i + A_i)
        C   = sum_i w_i (sum u x' + (W_i - W) A_i)

    Convolutions, behind which a BatchNorm may undo any scale, have samples alone.
    """

    def __init__(self, rule: Plus, group: Group, merged: Linear, base: Linear | None) -> None:
        """Start with no task."""
        self._rule, self._merged = rule, merged
        self._base = None if group.convolves else base
        self._few_outputs, self._dtype = group.has_few_outputs, group.dtype
        self._biased = group.biased and rule.calibrate_bias
        maps, outputs, inputs = merged.weight.shape
        self._probes = probes_of(merged.weight)
        sizes = maps, inputs, len(self._probes)
        self._folds = Moments.zeros(rule.folds, *sizes, merged.weight)
        self._cross = merged.weight.new_zeros(maps, outputs, inputs)
        self._y = merged.bias.new_zeros(maps, outputs)

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        return [*self._folds.tensors(), self._cross, self._y]

    def add(self, task: str, rows: Moments, expert: Linear) -> dict[str, Tensor]:
        """Add a task's targets once in full, and their combinations by fold."""
        whole, step = rows.total(), expert.minus(self._merged)
        weight = whole.task_weights(EPS) * self._rule.task_weights.get(task, 1.0)
        per_row = weight / whole.count[0]
        if self._base is not None and self._rule.gamma > 0:
            gamma = self._rule.gammas.get(task, self._rule.gamma)
            memory = gamma * self._memory(whole, expert.weight - self._base.weight)
            shares = (rows.count / whole.count)[..., None, None]
            rows = replace(rows, gram=rows.gram + shares * memory)
            whole = replace(whole, gram=whole.gram + memory)
        target = self._targets(whole, step, None if self._few_outputs else expert.weight)
        self._cross += per_row[:, None, None] * target.cross[0]
        self._y += per_row[:, None] * target.y[0]
        probed = Linear(self._probes @ step.weight, step.bias @ self._probes.T)
        reach = None if self._few_outputs else self._probes @ expert.weight
        if self._few_outputs:
            rows = rows.behind(self._probes[None])
        self._folds.merge(self._targets(rows, probed, reach), per_row)
        return {"norm": whole.gram_norms().mean(), "cross": target.cross.sum()}

    def _memory(self, whole: Moments, tau: Tensor) -> Tensor:
        """Return `A_i / (w_i gamma_i)`, `[1, g, d, d]`; zero where the expert is the base."""
        covariance = whole.means(centred=self._biased).gram
        energy = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) * whole.count
        square = tau.square().sum((-2, -1))
        energy = torch.where(square > 0, energy / square, 0.0)
        return energy[..., None, None] * (tau.mT @ tau)

    @staticmethod
    def _targets(rows: Moments, step: Linear, reach: Tensor | None) -> Moments:
        """Return moments of the targets.

        Args:
            rows: Moments of inputs and drift.
            step: The expert's parameters less those that change.
            reach: Map of the drift to the outputs; None: it has been mapped.
        """
        drift = rows if reach is None else rows.behind(reach)
        cross = step.weight @ rows.gram + drift.cross + step.bias[..., None] * rows.x[..., None, :]
        y = (step.weight @ rows.x[..., None])[..., 0] + drift.y + step.bias * rows.count[..., None]
        return Moments(rows.gram, cross, rows.x, y, rows.count)

    def solve(self) -> Solved:
        """Return the step with the ridge of least held-out error, and the bias that means leave."""
        whole, wide = self._folds.total(), solve_dtype(self._cross.device)
        sums = replace(whole, cross=self._cross[None], y=self._y[None])
        means = sums.means(centred=self._biased)
        scale = means.gram.diagonal(dim1=-2, dim2=-1).mean()
        energy = whole.means(centred=False).gram.diagonal(dim1=-2, dim2=-1).mean()
        ridge = choose_ridge(self._folds, biased=self._biased)
        step, residual, condition = torch.zeros_like(self._cross), 0.0, 1.0
        if ridge != NO_CHANGE and bool(scale > CONSTANT * energy):
            # Divided by the scale, so that the ridge is relative, as the solve's bounds are.
            gram, right = means.gram[0] / scale, means.cross[0] / scale
            rounding = torch.finfo(gram.dtype).eps
            solution = solve_ridge(gram, right, ridge, rounding=rounding)
            step, residual, condition = solution.step, solution.residual, solution.condition
        merged = self._merged.to(wide)
        weight = stored(merged.weight + step.to(wide), self._dtype)
        step = weight - merged.weight
        shift = means.y[0].to(wide) - (step @ means.x[0].to(wide)[..., None])[..., 0]
        solved = Linear(weight, merged.bias + shift)
        return Solved(solved, residual, condition, {"ridge": ridge})


def probes_of(like: Tensor) -> Tensor:
    """Return combinations `[r, m]` of outputs on which held-out errors are measured.

    Args:
        like: A weight `[g, m, d]`. Up to `PROBES` outputs are taken as they are, more are combined
            by random signs, the same in every process.
    """
    outputs = like.shape[1]
    if outputs <= PROBES:
        return torch.eye(outputs).to(like)
    return random_signs(outputs, like.dtype, like.device).T / PROBES**0.5
