"""Closed-form updates of weight, bias and LayerNorm affine (Eqs. 11, 17, 51-59).

`LinearSystem` and `NormSystem` hold sums over tasks, into which one task after another is folded;
memory is `O(d^2)` whatever the number of tasks. `solve_linear`, `solve_bias` and `solve_norm` do
the same with whole statistics of every task.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.cholesky import (
    SINGLE_LAMBDA,
    Factor,
    UnsolvedError,
    check_residual,
    factor_of,
    ridge_system,
    solve_dtype,
    solve_factorised,
    trusted_condition,
)
from fusion_bench_featcal.core.finite import read_back
from fusion_bench_featcal.core.moments import (
    LinearMoments,
    NormMoments,
    TaskMeans,
    weight_of_norm,
)
from fusion_bench_featcal.core.products import mirror_lower, norm_of_lower, times_transposed

Affine = tuple[Tensor, Tensor]
"""Gain and shift of a LayerNorm, `[d]` each."""


@dataclass(frozen=True, kw_only=True)
class LinearSolution:
    """Solution of one linear module (Eq. 17).

    Attributes:
        weight: `W*`, `[m, d]`, in the solve's dtype.
        task_weights: `w_i` of each task (Eq. 14), scalars.
        residual: `|W* A - R|_F / |R|_F` of the system that was solved, estimated.
        condition: Estimate of the system's condition number, by power iterations.
    """

    weight: Float[Tensor, "m d"]
    task_weights: dict[str, Tensor]
    residual: float
    condition: float


def extrapolate_anchor(merged: Tensor, base: Tensor | None, anchor_rho: float) -> Tensor:
    """Anchor `rho W_mer + (1 - rho) W_base` (Eq. 11).

    Args:
        merged: Parameter of the merged model, any shape.
        base: The base's parameter, same shape; None is allowed where `anchor_rho` is 1.
        anchor_rho: rho, any real number.

    Returns:
        The anchor in the solve's dtype.

    Raises:
        ValueError: If the base is missing and `anchor_rho` is not 1.
    """
    wide = solve_dtype(merged.device)
    merged = merged.to(wide)
    if anchor_rho == 1:
        return merged
    if base is None:
        raise ValueError(f"anchor_rho = {anchor_rho} needs the base model; without one set it to 1")
    base = base.to(wide)
    return base + anchor_rho * (merged - base)


@dataclass(frozen=True, kw_only=True)
class SharedSolution:
    """Solutions of the linear modules that share their input.

    Attributes:
        weights: `W*` of each module by name, `[m, d]`, in the solve's dtype.
        residuals: The relative residual of each.
        condition: Estimate of the condition number of their one system.
    """

    weights: dict[str, Tensor]
    residuals: dict[str, float]
    condition: float


class LinearSystem:
    """Sums over tasks for linear modules that share one input, and their solves (Eqs. 17, 51-55).

    All modules share the gram, the task weights and the Cholesky factor; each has its own right
    side. What is solved for is the difference to the module's anchor, whose right side
    `sum w_i (W_i C_i - W_anc G_i)` is exactly zero where nothing is to be done: it is summed as
    `sum w_i (W_i - W_anc) C_i`, to which `W_anc sum w_i (C_i - G_i)` is added once for all tasks.

    Attributes:
        task_weights: `w_i` of each folded task (Eq. 14), scalars.
        gram_norms: Frobenius norm of each folded task's mean gram, scalars.
        groups: 1, as of modules that are no grouped convolution.
    """

    groups: ClassVar = 1

    def __init__(
        self, anchors: Mapping[str, Tensor], *, eps: float, equal_weights: bool = False
    ) -> None:
        """Start with no task.

        Args:
            anchors: `W_anc` of each module by name, `[m, d]`, `d` alike for all.
            eps: Stabiliser of the matrix and floor of the norms.
            equal_weights: Whether every task weighs 1, in place of Eq. 14.
        """
        self._anchors, self._eps, self._rounding = dict(anchors), eps, 0.0
        self._equal_weights = equal_weights
        self._gram: Tensor | None = None
        self._shift: Tensor | None = None
        self._mean_cal: Tensor | None = None
        self._right: dict[str, Tensor] = {}
        self._bias_right: dict[str, Tensor] = {}
        self._lacks_anchor = self._is_closed = False
        self.task_weights: dict[str, Tensor] = {}
        self.gram_norms: dict[str, Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules."""
        return tuple(self._anchors)

    def fold(
        self,
        task: str,
        means: TaskMeans,
        expert_weights: Mapping[str, Tensor],
        expert_biases: Mapping[str, Tensor],
        *,
        absent: bool = False,
    ) -> None:
        """Fold one task in. Its means are used up: the first task's become the sums.

        Args:
            task: The task's name, not yet folded.
            means: Its means over all its rows; `reached` for all tasks or for none.
            expert_weights: Its expert's weight of each module, `[m, d]`.
            expert_biases: Its expert's bias of each module whose bias is calibrated, `[m]`.
            absent: Whether it has no rows here: it weighs nothing, and its means are zero.

        Raises:
            ValueError: If the task was folded before, the system has been solved, or `reached` is
                given for some tasks only.
            ZeroDivisionError: If all inputs are zero and eps is 0.
        """
        if task in self.task_weights:
            raise ValueError(f"task {task!r} was folded before")
        if self._is_closed:
            raise ValueError("no task can be folded into sums that have been solved")
        if self.task_weights and bool(means.reached) != self._lacks_anchor:
            raise ValueError("W_i C is given for some tasks and not for others")
        norm, dtype = norm_of_lower(means.gram), means.gram.dtype
        weight = torch.zeros_like(norm) if absent else weight_of_norm(norm, self._eps)
        if self._equal_weights and not absent:
            weight = torch.ones_like(norm)
        cross = means.gram
        if not means.reached:
            mirror_lower(means.gram)
            cross = means.gram if means.shift is None else means.gram + means.shift
        for name, anchor in self._anchors.items():
            expert = expert_weights[name].to(dtype)
            right = means.reached.get(name)
            if right is None:
                right = times_transposed(expert - anchor.to(dtype), cross)
            self._right[name] = _add_weighted(self._right.get(name), right, weight)
            if name in expert_biases:
                wanted = expert_biases[name].to(dtype) + expert @ means.mean_target
                self._bias_right[name] = _add_weighted(self._bias_right.get(name), wanted, weight)
        # These come last, as the first task's are changed.
        self._gram = _add_weighted(self._gram, means.gram, weight)
        self._mean_cal = _add_weighted(self._mean_cal, means.mean_cal, weight)
        if means.shift is not None:
            self._shift = _add_weighted(self._shift, means.shift, weight)
        self._lacks_anchor = bool(means.reached)
        self._rounding = max(self._rounding, means.rounding)
        self.task_weights[task], self.gram_norms[task] = weight, norm

    def tensors(self) -> list[Tensor]:
        """The sums, to which those of further tasks may be added in place, in a fixed order.

        No task can be folded in any more; the number of tensors and their shapes depend on the
        modules alone.
        """
        self._add_anchors()
        biases = [self._bias_right[name] for name in self._anchors if name in self._bias_right]
        rights = [self._right[name] for name in self._anchors]
        return [self._known(self._gram), self._known(self._mean_cal), *rights, *biases]

    def adopt(self, weights: Mapping[str, float]) -> None:
        """Take over the weights `w_i` of all tasks whose sums were added."""
        self.gram_norms = {}  # those of the tasks that were folded here say nothing any more
        self.task_weights = {t: self._known(self._gram).new_full((), w) for t, w in weights.items()}

    def solve(
        self, ridge_lambda: float, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> SharedSolution:
        """Calibrated weight of every module (Eq. 17). No task can be folded in afterwards.

        Float32 sums are solved in float32 where lambda bounds the condition (`SINGLE_LAMBDA`), and
        again in float64 where that was not enough.

        Args:
            ridge_lambda: lambda, >= 0.
            dtypes: Dtype of each weight that is returned; None: that of the solve.

        Raises:
            UnsolvedError: If the system has no trustworthy solution, naming the module.
        """
        self._add_anchors()
        gram = self._known(self._gram)
        wide = solve_dtype(gram.device)
        if ridge_lambda >= SINGLE_LAMBDA and gram.dtype != wide:
            try:
                return self._solve_in(gram.dtype, ridge_lambda, dtypes or {})
            except UnsolvedError:
                pass
        return self._solve_in(wide, ridge_lambda, dtypes or {})

    def _solve_in(
        self, dtype: torch.dtype, ridge_lambda: float, dtypes: Mapping[str, torch.dtype]
    ) -> SharedSolution:
        gram = self._known(self._gram)
        diagonal = gram.diagonal().clone()  # in its own dtype the gram itself becomes the system
        system = ridge_system(gram, ridge_lambda=ridge_lambda, eps=self._eps, dtype=dtype)
        factor = factor_of(system)
        weights: dict[str, Tensor] = {}
        estimates: list[Tensor] = []
        for name, anchor in self._anchors.items():
            anchor = anchor.to(dtype)
            right = self._right[name].to(dtype) - self._eps * anchor
            step, residual = solve_factorised(factor.lower, system, right)
            weights[name] = step.add_(anchor).to(dtypes.get(name, dtype))
            estimates.append(residual)
        gram.diagonal().copy_(diagonal)
        # The host looks once, at all modules.
        values = read_back([factor.signs, *estimates])
        signs, residuals = values[: Factor.SIGNS], values[Factor.SIGNS :]
        name, floor = next(iter(weights)), ridge_lambda + self._eps
        try:
            condition = trusted_condition(
                signs, size=len(gram), floor=floor, rounding=self._rounding
            )
            for name, residual in zip(weights, residuals, strict=True):  # noqa: B007
                check_residual(residual, dtype)
        except UnsolvedError as error:
            error.module = name
            raise
        by_name = dict(zip(weights, residuals, strict=True))
        return SharedSolution(weights=weights, residuals=by_name, condition=condition)

    def solve_bias(
        self, name: str, weight: Tensor, anchor: Tensor | None, ridge_lambda: float
    ) -> Float[Tensor, " m"]:
        """Calibrated bias of one module, given its calibrated weight (Eqs. 51-55).

        Args:
            name: The module's name.
            weight: `W*`, `[m, d]`.
            anchor: `b_anc`, `[m]`, or None: lambda is dropped on both sides.
            ridge_lambda: lambda, >= 0.

        Returns:
            `b*`, `[m]`, in float64 where the device has it: its two parts nearly cancel.
        """
        wide = solve_dtype(weight.device)
        right = self._bias_right[name].to(wide)
        right = right - weight.to(wide) @ self._known(self._mean_cal).to(wide)
        total = torch.stack(list(self.task_weights.values())).to(wide).sum()
        if anchor is not None:
            right, total = right + ridge_lambda * anchor.to(wide), total + ridge_lambda
        return right / total

    def _add_anchors(self) -> None:
        """Add to the right sides, once, what the anchors add over all tasks."""
        gram = self._known(self._gram)
        if self._lacks_anchor:
            mirror_lower(gram)
        moment, sign = (gram, -1) if self._lacks_anchor else (self._shift, 1)
        if moment is not None:
            for name, right in self._right.items():
                part = times_transposed(self._anchors[name].to(moment.dtype), moment)
                right.add_(part, alpha=sign)
        self._shift, self._lacks_anchor, self._is_closed = None, False, True

    @staticmethod
    def _known(sums: Tensor | None) -> Tensor:
        assert sums is not None  # there is at least one task
        return sums


def _add_weighted(total: Tensor | None, part: Tensor, weight: Tensor) -> Tensor:
    return part.mul_(weight) if total is None else total.addcmul_(part, weight)


class NormSystem:
    """Sums over tasks for one LayerNorm, and its solve, channel by channel (Eqs. 56-59).

    Attributes:
        tasks: Number of tasks that are in the sums.
    """

    def __init__(self) -> None:
        """Start with no task."""
        self._sums: list[Tensor] = []
        self.tasks = 0

    def fold(self, moments: NormMoments, expert_affine: Affine) -> None:
        """Fold one task in.

        Args:
            moments: Its sums over all its rows.
            expert_affine: Its expert's gain and shift, `[d]` each.
        """
        wide = solve_dtype(moments.sum_z.device)
        weight = moments.weight.to(wide)
        second, first = moments.sum_z_sq.to(wide) / weight, moments.sum_z.to(wide) / weight
        gain, shift = (part.to(wide) for part in expert_affine)
        new = [second, first, second * gain + first * shift, first * gain + shift]
        for old, part in zip(self._sums, new, strict=False):  # nothing before the first task
            part += old
        self._sums = new
        self.tasks += 1

    def tensors(self) -> list[Tensor]:
        """The sums, to which those of further tasks may be added in place; `tasks` counts them."""
        return self._sums

    def solve(self, anchor: Affine | None, *, ridge_lambda: float, eps: float) -> Affine:
        """Calibrated gain and shift (Eqs. 57-59).

        Args:
            anchor: Anchor gain and shift, or None (no base): lambda is dropped on both sides.
            ridge_lambda: lambda, >= 0.
            eps: Lower bound of each channel's determinant.

        Returns:
            Gain and shift, `[d]` each, in the solve's dtype.
        """
        second, first, right_gain, right_shift = self._sums
        pull = 0.0 if anchor is None else ridge_lambda
        a11, a12, a22 = second + pull, first, self.tasks + pull
        if anchor is not None:
            right_gain = right_gain + pull * anchor[0].to(second.dtype)
            right_shift = right_shift + pull * anchor[1].to(second.dtype)
        determinant = (a22 * a11 - a12 * a12).clamp_min(eps)
        gain = (a22 * right_gain - a12 * right_shift) / determinant
        shift = (a11 * right_shift - a12 * right_gain) / determinant
        return gain, shift


def solve_linear(
    moments: Mapping[str, LinearMoments],
    expert_weights: Mapping[str, Tensor],
    anchor: Tensor,
    *,
    mix_alpha: float,
    ridge_lambda: float,
    eps: float,
) -> LinearSolution:
    """Calibrated weight of one linear module (Eq. 17), in float64 where the device has it.

    `W* = (sum_i w_i W_i C_i + lambda W_anc) (sum_i w_i G_i + lambda I + eps I)^-1`, solved for
    the difference to the anchor, which makes the no-op case exact.

    Args:
        moments: Each task's sums.
        expert_weights: Each expert's weight `W_i`, `[m, d]`.
        anchor: `W_anc`, `[m, d]`, from `extrapolate_anchor`.
        mix_alpha: alpha (Eq. 10), 0 to 1.
        ridge_lambda: lambda, >= 0.
        eps: Stabiliser of the matrix and floor of the norms.

    Raises:
        UnsolvedError: If the system has no trustworthy solution.
        KeyError: If a task has moments but no expert weight.
    """
    wide = solve_dtype(anchor.device)
    system = LinearSystem({"": anchor.to(wide)}, eps=eps)
    for task, m in moments.items():
        system.fold(task, m.means(mix_alpha, wide), {"": expert_weights[task]}, {})
    solution = system.solve(ridge_lambda)
    return LinearSolution(
        weight=solution.weights[""],
        task_weights=system.task_weights,
        residual=solution.residuals[""],
        condition=solution.condition,
    )


def solve_bias(
    moments: Mapping[str, LinearMoments],
    expert_weights: Mapping[str, Tensor],
    expert_biases: Mapping[str, Tensor],
    weight: Tensor,
    task_weights: Mapping[str, Tensor],
    anchor: Tensor | None,
    *,
    mix_alpha: float,
    ridge_lambda: float,
) -> Float[Tensor, " m"]:
    """Calibrated bias, given the calibrated weight (Eqs. 51-55).

    Args:
        moments: Each task's sums.
        expert_weights: Each expert's weight, `[m, d]`.
        expert_biases: Each expert's bias, `[m]`.
        weight: `W*`, `[m, d]`.
        task_weights: `w_i` of each task, from `solve_linear`.
        anchor: `b_anc`, `[m]`; None (no base): the lambda term is dropped on both sides.
        mix_alpha: alpha (Eq. 10).
        ridge_lambda: lambda, >= 0.

    Returns:
        `b*`, `[m]`, in the solve's dtype.
    """
    wide = solve_dtype(weight.device)
    weight = weight.to(wide)
    pull = 0.0 if anchor is None else ridge_lambda
    right = weight.new_zeros(weight.shape[0]) if anchor is None else pull * anchor.to(wide)
    total = weight.new_tensor(pull)
    for task, m in moments.items():
        means, omega = m.means(mix_alpha, wide), task_weights[task].to(wide)
        wanted = expert_biases[task].to(wide) + expert_weights[task].to(wide) @ means.mean_target
        right = right + omega * (wanted - weight @ means.mean_cal)
        total = total + omega
    return right / total


def solve_norm(
    moments: Mapping[str, NormMoments],
    expert_affines: Mapping[str, Affine],
    anchor: Affine | None,
    *,
    ridge_lambda: float,
    eps: float,
) -> Affine:
    """Calibrated gain and shift of a LayerNorm, channel by channel (Eqs. 56-59).

    All tasks weigh the same and only features of the calibrated model enter.

    Args:
        moments: Each task's sums of normalised inputs.
        expert_affines: Each expert's gain and shift, `[d]` each.
        anchor: As for `NormSystem.solve`, and so `ridge_lambda`, `eps` and what is returned.
        ridge_lambda: lambda.
        eps: Lower bound of each channel's determinant.
    """
    system = NormSystem()
    for task, m in moments.items():
        system.fold(m, expert_affines[task])
    return system.solve(anchor, ridge_lambda=ridge_lambda, eps=eps)
