"""FeatCal+: modules in sequence, rows from the experts' weights, a ridge by cross-validation.

The mathematics is in docs/plus.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.products import add_lower_gram, columns_of, mirror_lower
from fusion_bench_featcal.core.ridge import NO_CHANGE, choose_ridge
from fusion_bench_featcal.core.solve import PROBES, random_signs, solve_ridge
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.rules.rule import GroupSums, Linear, Rule, Solved
from fusion_bench_featcal.rules.step import StepTargets

EPS = 1e-8
"""Smallest norm of a Gram matrix."""

CONSTANT = 1e-6
"""Inputs with a smaller ratio of variance to mean square count as constant up to rounding."""


@dataclass(frozen=True)
class Plus(Rule):
    """FeatCal+: groups of modules in sequence, each with the ridge of least held-out error.

    Attributes:
        gamma: Energy of the rows from an expert's weights, relative to the energy of the samples,
            if the samples are many and familiar (`trust.py`). With 0 only samples are used.
        gammas: The same by task, computed from the samples. Missing tasks use `gamma`.
        task_weights: Factors of the tasks' weights. Missing tasks use 1.
        calibrate_bias: Whether biases change.
    """

    gamma: float = 2.0
    gammas: Mapping[str, float] = field(default_factory=dict)
    task_weights: Mapping[str, float] = field(default_factory=dict)
    calibrate_bias: bool = True
    mix_alpha = 1.0
    folds = 4
    notes_outputs = True
    reads_closing_rows = True

    @property
    def reads_base(self) -> bool:
        """Return whether rows from weights join the samples."""
        return self.gamma > 0

    @property
    def weighs_trust(self) -> bool:
        """Return whether the weight of these rows depends on trust in the samples."""
        return self.gamma > 0 and not self.gammas

    def turns(self, groups: Sequence[Any]) -> list[Sequence[Any]]:
        """Solve one group after another. Later groups receive the outputs of updated ones."""
        return [[group] for group in groups]

    def sums(self, group: Group, merged: Linear, base: Linear | None) -> GroupSums:
        """Return empty sums relative to the merged modules."""
        return PlusSums(self, group, merged, base)


class PlusSums:
    """Sums for the step from the merged modules, `E = C (G + l s I)^-1`.

    The target of a sample is the residual of the expert's module, `u = W_i x_exp + b_i - W x - b`.
    Fine-tuning adds multiples of inputs to a weight. With `tau_i = W_i - W_base`, stacked over the
    group, `tau_i' tau_i` is therefore a second moment of expert i's training data. It joins the
    samples in every fold as rows of mean zero whose target is the expert's output:

        A_i = gamma_i n_i tr(cov_i) tau_i' tau_i / |tau_i|_F^2    gamma 1: the energy of the samples
        G   = sum_i w_i (n_i cov_i + A_i)
        C   = sum_i w_i (sum u x' + (W_i - W) A_i)

    Convolutions use samples alone, since a BatchNorm behind them may undo any scale.
    """

    def __init__(self, rule: Plus, group: Group, merged: Linear, base: Linear | None) -> None:
        """Start with no task."""
        self._rule, self._has_few_outputs = rule, group.has_few_outputs
        self._base = base if rule.gamma > 0 and not group.convolves else None
        self._biased = group.biased and rule.calibrate_bias
        self._targets = StepTargets(group, merged, alpha=rule.mix_alpha)
        self._probes = probes_of(merged.weight)
        maps, _, inputs = merged.weight.shape
        self._folds = Moments.zeros(rule.folds, maps, inputs, len(self._probes), merged.weight)

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        return [*self._folds.tensors(), *self._targets.tensors()]

    def add(self, task: str, rows: Moments, expert: Linear) -> dict[str, Tensor]:
        """Add a task's targets once in full, and their random combinations by fold."""
        whole, step = rows.total(), expert.minus(self._targets.anchor)
        weight = whole.task_weights(EPS) * self._rule.task_weights.get(task, 1.0)
        if self._base is not None:
            gamma = self._rule.gammas.get(task, self._rule.gamma)
            self._remember(rows, whole, expert.weight, expert.weight - self._base.weight, gamma)
        factor = weight / whole.count[0]
        total = self._targets.add(whole, expert, factor)
        biases = (factor[:, None] * step.bias)[..., None]
        self._targets.cross[0].addcmul_(biases, whole.x[0][:, None, :])
        self._folds.merge(self._probed(rows, expert, step), factor)
        return {"norm": whole.gram_norms().mean(), "cross": total}

    def _remember(
        self, rows: Moments, whole: Moments, weight: Tensor, tau: Tensor, gamma: float
    ) -> None:
        """Add the rows from weights to the samples, by fold and in full. `A_i` of the base is 0."""
        energy = whole.variances(centred=self._biased).sum().clamp_min(0) * whole.count.sum()
        square = tau.square().sum()
        scale = torch.where(square > 0, gamma * energy / square, 0.0)
        memory, tau = torch.zeros_like(whole.gram[0, 0]), tau * scale.sqrt()
        add_lower_gram(memory, columns_of(tau[0]))
        share = (rows.count / whole.count)[..., None, None]
        rows.gram.addcmul_(share, mirror_lower(memory))
        whole.gram.add_(memory)
        if self._has_few_outputs:
            answers = (weight @ tau.mT) @ tau
            rows.cross.addcmul_(share, answers)
            whole.cross.add_(answers)

    def _probed(self, rows: Moments, expert: Linear, step: Linear) -> Moments:
        """Return moments of combinations of the targets, by fold."""
        weight, reach = self._probes @ step.weight, self._probes @ expert.weight
        if self._has_few_outputs:
            weight, reach = -self._probes @ self._targets.anchor.weight, self._probes[None]
        bias = step.bias @ self._probes.T
        cross = weight @ rows.gram + reach @ rows.cross + bias[..., None] * rows.x[..., None, :]
        y = (weight @ rows.x[..., None] + reach @ rows.y[..., None])[..., 0]
        return replace(rows, cross=cross, y=y + bias * rows.count[..., None])

    def solve(self) -> Solved:
        """Return the step with the ridge of least held-out error, and the bias from the means."""
        whole = self._folds.total()
        cross, y = self._targets.complete(whole.gram[0], whole.x[0])
        means = replace(whole, cross=cross, y=y).means(centred=self._biased)
        scale = means.gram.diagonal(dim1=-2, dim2=-1).mean()
        energy = whole.variances(centred=False).mean()
        ridge = choose_ridge(self._folds, biased=self._biased)
        step, residual, condition = torch.zeros_like(cross[0]), 0.0, 1.0
        if ridge != NO_CHANGE and bool(scale > CONSTANT * energy):
            # Divided by the scale, because the ridge and the solve's bounds are relative to it.
            gram, right = means.gram[0] / scale, means.cross[0] / scale
            rounding = torch.finfo(gram.dtype).eps
            solution = solve_ridge(gram, right, ridge, rounding=rounding)
            step, residual, condition = solution.step, solution.residual, solution.condition
        linear = self._targets.moved(step, whole.x[0], whole.count[0])
        return Solved(linear, residual, condition, {"ridge": ridge})


def probes_of(like: Tensor) -> Tensor:
    """Return combinations `[r, m]` of outputs for measuring held-out errors.

    Args:
        like: A weight `[g, m, d]`. Up to `PROBES` outputs are used as they are. More are combined
            by random signs, equal in every process.
    """
    outputs = like.shape[1]
    if outputs <= PROBES:
        return torch.eye(outputs).to(like)
    return random_signs(outputs, like.dtype, like.device).T / PROBES**0.5
