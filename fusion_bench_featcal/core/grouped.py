"""Sums and solves of a grouped convolution: many small linear maps at a time (Eqs. 13-17, 51-55).

Everything is as in `LinearSums` and `LinearSystem`, with a leading dimension for the groups, each
of which is a linear module of its own. Their matrices are small: the cross moment is always formed,
and every system is solved in float64.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.cholesky import (
    UnsolvedError,
    check_residual,
    solve_dtype,
    trusted_condition,
)
from fusion_bench_featcal.core.finite import not_finite, read_back
from fusion_bench_featcal.core.moments import MOMENT_DTYPE, gram_rounding, weight_of_norm
from fusion_bench_featcal.core.solve import SharedSolution

LEAST_SHARE = 1e-3
"""A group's gram counts as at least this share of the task's mean one: channels that a task never
uses would else outweigh all other tasks."""


@dataclass(frozen=True, kw_only=True)
class GroupedMeans:
    """Means over one task's rows of each group's inputs.

    Attributes:
        gram: `G`, `[g, d, d]`.
        shift: `(C - G)'`, `[g, d, d]`; None: zero.
        mean_cal: `mu_cal`, `[g, d]`.
        mean_target: `mu_tgt`, `[g, d]`.
        rounding: Rounding of the grams, relative to their diagonals.
    """

    gram: Float[Tensor, "g d d"]
    shift: Float[Tensor, "g d d"] | None
    mean_cal: Float[Tensor, "g d"]
    mean_target: Float[Tensor, "g d"]
    rounding: float


class GroupedSums:
    """Running sums over one task's rows, for the groups of one convolution (Eq. 13).

    Attributes:
        gram: `sum x_cal x_cal'`, `[g, d, d]`.
        cross: `sum x_cal (x_exp - x_cal)'`, `[g, d, d]`; None where alpha is 0.
        sum_cal: `sum x_cal`, `[g, d]`.
        sum_shift: `sum (x_exp - x_cal)`, `[g, d]`.
        weight: Number of rows, a scalar.
    """

    def __init__(
        self,
        like: Tensor,
        groups: int,
        *,
        mix_alpha: float,
        dtype: torch.dtype = MOMENT_DTYPE,
        mean_dtype: torch.dtype = MOMENT_DTYPE,
    ) -> None:
        """Start with no rows.

        Args:
            like: Rows, `[..., groups * d]`, for width, dtype and device.
            groups: Number of groups.
            mix_alpha: alpha (Eq. 10).
            dtype: Least precise dtype of the sums.
            mean_dtype: Least precise dtype of the means.
        """
        zero = like.new_zeros((), dtype=torch.promote_types(like.dtype, dtype))
        width = like.shape[-1] // groups
        self._alpha = mix_alpha
        self._mean_dtype = torch.promote_types(zero.dtype, mean_dtype)
        self._rounding = gram_rounding(like.dtype, zero.dtype)
        self.gram = zero.new_zeros(groups, width, width)
        self.cross = torch.zeros_like(self.gram) if mix_alpha > 0 else None
        self.sum_cal, self.sum_shift = zero.new_zeros(2, groups, width).unbind()
        self.weight = zero.clone()

    def add(self, x_cal: Tensor, x_exp: Tensor | None, row_weights: Tensor | None = None) -> None:
        """Add rows, all of which count and weigh 1.

        Args:
            x_cal: Inputs in the calibrated model, `[..., groups * d]`.
            x_exp: Inputs of the same rows in the expert; None where alpha is 0.
            row_weights: None.
        """
        assert row_weights is None
        cal = self._by_group(x_cal)
        self.weight += cal.shape[1]
        self.sum_cal += cal.sum(1)
        self.gram.baddbmm_(cal.mT, cal)
        if self.cross is not None:
            assert x_exp is not None
            shift = self._by_group(x_exp) - cal
            self.sum_shift += shift.sum(1)
            self.cross.baddbmm_(cal.mT, shift)

    def _by_group(self, rows: Tensor) -> Float[Tensor, "g n d"]:
        groups, width = self.sum_cal.shape
        return rows.reshape(-1, groups, width).transpose(0, 1).to(self.gram.dtype).contiguous()

    def not_finite(self) -> Tensor:
        """1 where a sum is NaN or infinite, else 0, a scalar."""
        return torch.stack([not_finite(part) for part in self.tensors()[3:]]).any()

    def tensors(self) -> list[Tensor]:
        """The sums, to which those of further rows may be added in place, in a fixed order."""
        cross = [] if self.cross is None else [self.cross]
        return [self.weight, self.sum_cal, self.sum_shift, self.gram, *cross]

    def means(self) -> GroupedMeans:
        """Means over all rows. The sums are used up: this ends them."""
        dtype = self._mean_dtype
        total = self.weight.to(dtype)
        mean_cal = self.sum_cal.to(dtype) / total
        return GroupedMeans(
            gram=self.gram.to(dtype).div_(total),
            shift=None if self.cross is None else self.cross.to(dtype).mul_(self._alpha / total),
            mean_cal=mean_cal,
            mean_target=mean_cal + self._alpha * (self.sum_shift.to(dtype) / total),
            rounding=self._rounding,
        )


class GroupedSystem:
    """Sums over tasks for the groups of one convolution, and their solves (Eqs. 17, 51-55).

    Each group has task weights of its own. As in `LinearSystem` the difference to the anchor is
    solved for.

    Attributes:
        task_weights: Mean over the groups of each folded task's `w_i`, scalars, for people.
        gram_norms: Frobenius norm of each folded task's mean grams, scalars.
        groups: Number of groups.
    """

    def __init__(
        self, name: str, anchor: Tensor, groups: int, *, eps: float, equal_weights: bool = False
    ) -> None:
        """Start with no task.

        Args:
            name: The module's name.
            anchor: `W_anc` of all groups, one below the other, `[out, d]`.
            groups: Number of groups.
            eps: Stabiliser of the matrices and floor of the norms.
            equal_weights: Whether every task weighs 1, in place of Eq. 14.
        """
        self._name, self._eps, self._rounding = name, eps, 0.0
        self._equal_weights = equal_weights
        anchor = anchor.to(solve_dtype(anchor.device))
        self.groups = groups
        self._anchor = anchor.reshape(groups, -1, anchor.shape[-1])
        zeros, (_, outputs, width) = self._anchor.new_zeros, self._anchor.shape
        self._gram, self._right = zeros(groups, width, width), zeros(groups, outputs, width)
        self._mean_cal, self._bias_right = zeros(groups, width), zeros(groups, outputs)
        self._weight = zeros(groups)
        self.task_weights: dict[str, Tensor] = {}
        self.gram_norms: dict[str, Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Name of the module, as of `LinearSystem`."""
        return (self._name,)

    def fold(
        self,
        task: str,
        means: GroupedMeans,
        expert_weights: Mapping[str, Tensor],
        expert_biases: Mapping[str, Tensor],
    ) -> None:
        """Fold one task in.

        Args:
            task: The task's name.
            means: Its means over all its rows.
            expert_weights: Its expert's weight by the module's name, `[out, d]`.
            expert_biases: Its expert's bias, `[out]`; empty where the bias is not calibrated.

        Raises:
            ZeroDivisionError: If all inputs are zero and eps is 0.
        """
        norms = means.gram.square().sum((1, 2)).sqrt()
        whole = norms.square().sum().sqrt()
        weight_of_norm(whole, self._eps)  # refuses a task whose inputs are all zero
        floor = torch.clamp_min(LEAST_SHARE * norms.square().mean().sqrt(), self._eps)
        weight = (1 / torch.maximum(norms, floor)).to(self._weight)
        if self._equal_weights:
            weight = torch.ones_like(weight)
        gram = means.gram.to(self._gram)
        expert = expert_weights[self._name].to(gram).reshape(self._anchor.shape)
        cross = gram if means.shift is None else gram + means.shift.to(gram).mT
        right = expert @ cross - self._anchor @ gram
        self._gram.addcmul_(gram, weight[:, None, None])
        self._right.addcmul_(right, weight[:, None, None])
        self._mean_cal.addcmul_(means.mean_cal.to(gram), weight[:, None])
        self._weight += weight
        if self._name in expert_biases:
            wanted = (expert @ means.mean_target.to(gram)[..., None])[..., 0]
            wanted = wanted + expert_biases[self._name].to(gram).reshape(wanted.shape)
            self._bias_right.addcmul_(wanted, weight[:, None])
        self._rounding = max(self._rounding, means.rounding)
        self.task_weights[task], self.gram_norms[task] = weight.mean(), whole

    def tensors(self) -> list[Tensor]:
        """The sums, to which those of further tasks may be added in place, in a fixed order."""
        return [self._weight, self._gram, self._mean_cal, self._right, self._bias_right]

    def adopt(self, weights: Mapping[str, float]) -> None:
        """Nothing: the sum of the tasks' weights is among the sums."""

    def solve(
        self, ridge_lambda: float, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> SharedSolution:
        """Calibrated weight (Eq. 17), `[out, d]`; arguments as for `LinearSystem`.

        Raises:
            UnsolvedError: If a group's system has no trustworthy solution, naming the module.
        """
        wide = solve_dtype(self._gram.device)
        floor = ridge_lambda + self._eps
        system = self._gram.to(wide)
        system = system + floor * torch.eye(system.shape[-1], dtype=wide, device=system.device)
        right = self._right.to(wide) - self._eps * self._anchor.to(wide)
        lower, failed = torch.linalg.cholesky_ex(system)
        step = torch.cholesky_solve(right.mT, lower).mT
        residual = (step @ system - right).norm() / right.norm().clamp_min(torch.finfo(wide).tiny)
        values = read_back([*self._signs(system, lower, failed), residual])
        try:
            condition = trusted_condition(
                values[:-1], size=system.shape[-1], floor=floor, rounding=self._rounding
            )
            check_residual(values[-1], wide)
        except UnsolvedError as error:
            error.module = self._name
            raise
        weight = (step + self._anchor.to(wide)).flatten(0, 1)
        weight = weight.to((dtypes or {}).get(self._name, wide))
        return SharedSolution(
            weights={self._name: weight}, residuals={self._name: values[-1]}, condition=condition
        )

    @staticmethod
    def _signs(system: Tensor, lower: Tensor, failed: Tensor) -> list[Tensor]:
        """`Factor.signs` of the worst group; its condition number from the factor's inverse."""
        pivots = lower.diagonal(dim1=1, dim2=2) ** 2
        scale = system.diagonal(dim1=1, dim2=2).amax(1)
        worst = (pivots.amin(1) / scale).argmin()
        eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
        inverse = torch.cholesky_solve(eye.expand_as(system), lower)
        norms = [torch.linalg.matrix_norm(part, ord=1) for part in (system, inverse)]
        return [
            not_finite(system),
            failed.ne(0).any(),
            pivots.amin(1)[worst],
            scale[worst],
            (norms[0] * norms[1]).max(),
        ]

    def solve_bias(
        self, name: str, weight: Tensor, anchor: Tensor | None, ridge_lambda: float
    ) -> Float[Tensor, " m"]:
        """Calibrated bias, given the calibrated weight (Eqs. 51-55), as `LinearSystem` has it."""
        wide = solve_dtype(weight.device)
        reached = weight.to(wide).reshape(self._anchor.shape) @ self._mean_cal.to(wide)[..., None]
        right, total = self._bias_right.to(wide) - reached[..., 0], self._weight.to(wide)[:, None]
        if anchor is not None:
            right = right + ridge_lambda * anchor.to(wide).reshape(right.shape)
            total = total + ridge_lambda
        return (right / total).flatten()
