"""FeatCal+: modules in sequence, task-vector rows, and ridges chosen on held-out samples.

The mathematics is in docs/reference/formulas.md.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.finite import read_back
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.solve import (
    PROBES,
    SINGLE_RIDGE,
    UnsolvedError,
    random_signs,
    solve_ridge,
)
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.rules.rule import EPS, GroupSums, Linear, Rule, Solved, check_number
from fusion_bench_featcal.rules.targets import Targets
from fusion_bench_featcal.rules.task_vector_rows import TaskVectorRows

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)

WITHOUT_HELD_OUT = 1e-2
"""Ridge if no sample is held out, of many samples."""

LEAST_DRIFT = 1e-8
"""Smallest relative output drift in a task's weight, which would otherwise vanish."""


@dataclass(frozen=True)
class Plus(Rule):
    """FeatCal+: groups of modules in sequence, each with the ridge of least held-out error.

    Attributes:
        gamma: Energy of the task-vector rows relative to the energy of the samples, for a task
            with many samples that agree with its expert (`run/trust.py`). 0 uses samples only.
        gammas: The value of `gamma` by task. Missing values are computed from the samples
            (`run/trust.py`).
        lacks: How few samples each task has: `max(64 / k_i, 1)` for `k_i` samples. Missing values
            are computed from the samples.
        convolution_scales: Factor of a convolution's step by task, `min(k_i / 64, 1)^(1/2)` for
            `k_i` samples without augmented ones. Missing values are computed from the samples.
        far: Exponent of the merged modules' relative output drift in a task's weight. With 0 the
            drift has no influence.
        ridges: Ridges to choose from, relative to the mean eigenvalue of the inputs' covariance.
        task_weights: Factors of the tasks' weights. Missing tasks use 1.
        balance: Exponent of each task's distance from its expert in a further factor of its
            weight. A first calibration measures the distances (`run/balance.py`). With 0 there is
            only one calibration.
        calibrate_bias: Whether biases change.
        task_vectors_only: Whether weights change only as the task-vector rows ask for, and biases
            do not change. None: if the samples fit no task (`run/trust.py`). False suits tasks that
            read the same inputs, whose samples cannot differ.
    """

    gamma: float = 4.0
    gammas: Mapping[str, float] = field(default_factory=dict)
    lacks: Mapping[str, float] = field(default_factory=dict)
    convolution_scales: Mapping[str, float] = field(default_factory=dict)
    far: float = 0.25
    ridges: Sequence[float] = RIDGES
    task_weights: Mapping[str, float] = field(default_factory=dict)
    balance: float = 0.0
    calibrate_bias: bool = True
    task_vectors_only: bool | None = None
    mix_alpha = 1.0
    augment = "auto"
    decoder_rows = "auto"
    counts_read_positions_only = True
    weighs_trust = True

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, 0)
        check_number("far", self.far, 0)
        check_number("balance", self.balance, 0)
        for ridge in self.ridges:
            check_number("ridges", ridge, 0)
        if not len(self.ridges):
            raise ValueError("ridges must be at least one number")
        for task, factor in self.task_weights.items():
            check_number(f"task_weights[{task!r}]", factor, torch.finfo(torch.float32).tiny)

    @property
    def holds_out(self) -> bool:  # type: ignore[override]
        """Return whether a quarter of the samples is held out to choose ridges."""
        return len(self.ridges) > 1

    @property
    def reads_base(self) -> bool:
        """Return whether rows from weights join the samples."""
        return self.gamma > 0

    def turns(self, groups: Sequence[Any]) -> list[Sequence[Any]]:
        """Solve modules with one input together. Later turns see the outputs of updated modules."""
        return [[*turn] for _, turn in groupby(groups, key=attrgetter("shared_input"))]

    def sums(self, group: Group, merged: Linear, base: Linear | None) -> GroupSums:
        """Return empty sums relative to the merged modules."""
        return PlusSums(self, group, merged, base)


class PlusSums:
    """Sums for the step from the merged modules, `E = C (G + r g I)^-1`, `g` the mean of diag(G).

    The target of a sample is the residual of the expert's module, `u = W_i x_exp + b_i - W x - b`.
    Fine-tuning adds multiples of inputs to a weight. With `tau_i = W_i - W_base`, stacked over the
    group, `tau_i' tau_i` is therefore a second moment of expert i's training data. It joins the
    samples as rows of mean zero whose target is the expert's output:

        A_i = gamma_i s_i tau_i' tau_i / |tau_i|_F^2    gamma 1: the energy of the samples
        w_i = (|(W_i - W) x + b_i - b|^2 / |W_i x + b_i|^2)^far / |sum x x'|_F
        G   = sum_i w_i (n_i cov_i + f A_i)
        C   = sum_i w_i (sum u x' + f (W_i - W) A_i)

    The energy `s_i` is the sum of `|x - m|^2`, where `m` is the mean of the samples. If the bias
    does not change, `m` is 0 and `n_i cov_i` is `sum x x'`. The weight `f` of these rows depends
    on their effect on the samples of all tasks (`TaskVectorRows.weight_and_facts`), so their sums
    stay separate until all tasks are summed.

    The ridge `r` is the one whose step from three quarters of the samples has the least error on
    the fourth. Among ridges whose errors are equal up to rounding, the largest is chosen. If no
    sample is held out, because there are too few, it is `0.01 (f + (1 - f) L)` with the mean `L` of
    the tasks' `lacks`: it grows as far as no task-vector rows stand in for missing samples. The
    task-vector rows are divided between both parts in proportion to the samples. The step itself
    is then solved from all samples. Convolutions use samples alone, because a BatchNorm after them
    may undo any scale. The patches of an image are no independent rows, so the step of a
    convolution from few images is scaled down (`Plus.convolution_scales`).
    """

    def __init__(self, rule: Plus, group: Group, merged: Linear, base: Linear | None) -> None:
        """Start with no task."""
        self._rule, self._has_few_outputs = rule, group.has_few_outputs
        self._scales = rule.convolution_scales if group.convolves else {}
        self._centred = group.biased and rule.calibrate_bias
        self._targets = Targets(group, merged, rule.mix_alpha)
        self._probes = probes_of(merged.weight)
        self._lack, self._cut = merged.weight.new_zeros(()), merged.weight.new_zeros(())
        inputs = merged.weight.shape[1]
        self._held_out = Moments.zeros(inputs, len(self._probes), merged.weight)
        base = base if rule.gamma > 0 and not group.convolves else None
        self._rows = None if base is None else TaskVectorRows(base.weight, merged.weight)

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        row_tensors = [] if self._rows is None else self._rows.tensors()
        sums = [*self._targets.tensors(), *self._held_out.tensors()]
        return [*sums, self._lack, self._cut, *row_tensors]

    def add(
        self, task: str, expert: Linear, rows: Moments, held_out: Moments | None = None
    ) -> None:
        """Add the targets of a task, and random combinations of the held-out targets.

        The `[m, d]` sums cover all samples, and the held-out part is subtracted where ridges are
        compared, so only one such set is kept. `rows` is overwritten with the sums over both parts.
        """
        anchor, rule = self._targets.anchor, self._rule
        if held_out is not None:
            rows += held_out
        step = expert.minus(anchor)
        mismatch = energy(step, rows)
        drift = mismatch / energy(expert, rows).clamp_min(EPS)
        weight = rows.row_weight(EPS) * drift.clamp_min(LEAST_DRIFT) ** rule.far
        weight = weight * rule.task_weights.get(task, 1.0)
        if self._rows is not None:
            power = weight * rows.energy(centred=self._centred)
            self._rows.add(expert.weight, step.weight, rule.gammas[task], power, weight * mismatch)
        self._targets.add(rows, expert, weight)
        self._lack.addcmul_(rows.count, weight * rule.lacks[task])
        self._cut.addcmul_(rows.count, weight * (1 - self._scales.get(task, 1.0)))
        # `Targets` sums `u x'` without biases, as the paper's system has none (Eq. 17). Here they
        # are part of the target.
        self._targets.sums.cross.addr_(step.bias, rows.x * weight)
        if held_out is not None:
            self._held_out.merge(self._probed(held_out, expert, step), weight)

    def _probed(self, rows: Moments, expert: Linear, step: Linear) -> Moments:
        """Return moments with the probes' combinations of the targets."""
        weight, reach = self._probes @ step.weight, self._probes @ expert.weight
        if self._has_few_outputs:
            weight, reach = -self._probes @ self._targets.anchor.weight, self._probes
        bias = self._probes @ step.bias
        cross = rows.times(weight) + reach @ rows.cross + torch.outer(bias, rows.x)
        y = weight @ rows.x + reach @ rows.y + bias * rows.count
        return Moments(rows.gram, cross, rows.x, y, rows.count)

    def solve(self) -> Solved:
        """Return the step with the ridge of least held-out error, and the bias from the means."""
        if self._rule.task_vectors_only:
            return self._solve_task_vectors()
        # `finalize` returns the sums without a copy, so `_join_rows` adds the task-vector rows to
        # `sums`.
        sums, lack, cut = self._targets.finalize(), *self._lack_and_cut()
        facts = self._join_rows(lack)
        means, step, residual = sums.means(centred=self._centred), torch.zeros_like(sums.cross), 0.0
        scale, ridge = means.gram.diagonal().mean(), self._rule.ridges[0]
        if sums.varies(means):
            if self._rule.holds_out:
                f = facts.get("f", 0.0)
                ridge = self._best_ridge(sums, WITHOUT_HELD_OUT * (f + (1 - f) * lack))
            # Divided by the scale, because the ridge and the solve's bounds are relative to it.
            gram, right = means.gram.div_(scale), means.cross.div_(scale)
            rounding = torch.finfo(gram.dtype).eps
            step, residual = solve_ridge(gram, right, ridge, rounding=rounding)
            step.mul_(1 - cut)  # exactly 1 with enough samples
        return Solved(self._targets.moved(step), residual, {"ridge": ridge, **facts})

    def _solve_task_vectors(self) -> Solved:
        """Return the step of the task-vector rows alone times their weight, and the merged bias.

        Samples that fit no task only measure this weight. Without task-vector rows nothing changes.
        """
        sums, anchor, rows = self._targets.finalize(), self._targets.anchor, self._rows
        step, facts = torch.zeros_like(sums.cross), dict[str, float]()
        if rows is not None:
            samples = sums.means(centred=self._centred)
            lack, _ = self._lack_and_cut()
            facts |= rows.weight_and_facts(samples, anchor, self._probes, lack)
            del samples  # frees memory before the solve
            if facts["f"] > 0:
                step = rows.step(rows.cross).mul_(facts["f"])
        moved = self._targets.moved(step)
        return Solved(moved._replace(bias=anchor.bias.to(moved.bias)), 0.0, facts)

    def _lack_and_cut(self) -> list[float]:
        """Return means over tasks of `lacks`, and of the share that a convolution's step loses.

        Tasks are weighted as their positions are.
        """
        count = self._targets.sums.count
        return read_back([self._lack / count, self._cut / count])

    def _join_rows(self, lack: float) -> Mapping[str, float]:
        """Add the weighted task-vector rows to the samples, and return facts for the log."""
        if self._rows is None:
            return {}
        rows, held_out, sums = self._rows, self._held_out, self._targets.finalize()
        samples = sums.means(centred=self._centred)
        facts = rows.weight_and_facts(samples, self._targets.anchor, self._probes, lack)
        del samples  # frees memory before the solve, as does the next line
        self._rows = None
        part = facts["f"] * held_out.count / sums.count
        sums.gram.add_(rows.gram, alpha=facts["f"])
        sums.cross.add_(rows.cross, alpha=facts["f"])
        held_out.gram.addcmul_(rows.gram, part)
        held_out.cross.addcmul_(self._probes @ rows.cross, part)
        return facts

    def _best_ridge(self, sums: Moments, without: float) -> float:
        """Return the ridge whose step from the other samples has the least error on held-out ones.

        Outputs are compared in the probes' random combinations.

        Args:
            sums: Sums over all samples and the task-vector rows.
            without: The ridge if no sample is held out, or the others are all equal.
        """
        held_out, probes = self._held_out, self._probes
        fitted = Moments(
            sums.gram - held_out.gram,
            probes @ sums.cross - held_out.cross,
            sums.x - held_out.x,
            probes @ sums.y - held_out.y,
            sums.count - held_out.count,
        )
        if not (held_out.count > 0 and fitted.count > 0):
            return without
        means = fitted.means(centred=self._centred)
        if not fitted.varies(means):  # one row, or equal ones, of modules with a bias
            return without
        scale = means.gram.diagonal().mean()
        gram, right = means.gram.div_(scale), means.cross.div_(scale)
        # With targets `u`, the sum of `|E x + b - u|^2` is that of `|E x + b|^2 - 2 u' (E x + b)`
        # plus `|u|^2`, which no ridge changes and which is therefore never summed.
        # The terms of an error are sums of at least `width` products, which round independently.
        rounding = torch.finfo(gram.dtype).eps * len(gram) ** 0.5

        def error_of(ridge: float) -> tuple[float, float]:
            try:
                step, _ = solve_ridge(gram, right, ridge)
            except UnsolvedError:  # a smaller one than float64 resolves
                return math.inf, 0.0
            step = step.to(gram.dtype)
            bias = means.y - step @ means.x if self._centred else torch.zeros_like(means.y)
            fit = torch.cat([(step * held_out.cross).flatten(), bias * held_out.y])
            terms = torch.cat([energies(Linear(step, bias), held_out), -2 * fit]).double()
            error = float(terms.sum())
            return error if math.isfinite(error) else math.inf, float(terms.abs().sum()) * rounding

        return ridge_of_least_error(self._rule.ridges, error_of)


def ridge_of_least_error(
    ridges: Iterable[float], error_of: Callable[[float], tuple[float, float]]
) -> float:
    """Return the ridge of least error, as of `largest_of_equal`.

    Small ridges are solved in float64, which takes twice the time. They are tried from the largest
    one downwards, until one is not the best so far.

    Args:
        ridges: The ridges.
        error_of: Returns a ridge's error, infinite if it cannot be used, and the rounding of that.
    """
    errors = dict[float, tuple[float, float]]()
    for ridge in sorted(ridges, reverse=True):
        if ridge < SINGLE_RIDGE and errors and largest_of_equal(errors) > min(errors):
            break
        errors[ridge] = error_of(ridge)
    best = largest_of_equal(errors)
    return best if math.isfinite(errors[best][0]) else WITHOUT_HELD_OUT


def largest_of_equal(errors: Mapping[float, tuple[float, float]]) -> float:
    """Return the largest ridge whose error is the least one up to rounding.

    Args:
        errors: Ridge -> its error, and the rounding of that.
    """
    least, bound = min(errors.values())
    return max(r for r, (error, rounding) in errors.items() if error - rounding <= least + bound)


def energy(linear: Linear, rows: Moments) -> Tensor:
    """Return the sum of `|W x + b|^2` over rows, a scalar."""
    return energies(linear, rows).sum()


def energies(linear: Linear, rows: Moments) -> Tensor:
    """Return the sums of `|W x|^2`, `2 b' W x` and `|b|^2` over rows, `[3]`."""
    weight, bias = linear
    square = rows.squares(weight)
    mixed = 2 * bias @ (weight @ rows.x)
    return torch.stack([square, mixed, rows.count * bias.square().sum()])


def probes_of(weight: Tensor) -> Tensor:
    """Return combinations `[r, m]` of outputs for measuring held-out errors.

    Args:
        weight: `[m, d]`. Up to `PROBES` outputs are used as they are. More are combined by random
            signs, equal in every process.
    """
    outputs = len(weight)
    if outputs <= PROBES:
        return torch.eye(outputs).to(weight)
    return random_signs(outputs, weight.dtype, weight.device).T / PROBES**0.5
