"""Running sums of a block: one task is folded in at a time, then its own statistics are dropped.

Memory is `O(d^2)` whatever the number of tasks. Tested equal to `core.solve`, the definition.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fusion_bench_featcal.core.cholesky import (
    factorise,
    ridge_system,
    solve_dtype,
    solve_factorised,
)
from fusion_bench_featcal.core.moments import (
    LinearMoments,
    NormMoments,
    gram_norm,
    task_weight,
)
from fusion_bench_featcal.core.solve import Affine, LinearSolution, solve_affine


class FoldedLinear:
    """Running sums for the linear modules that share one input, and their solves (Eqs. 17, 51-55).

    All modules share the gram, the task weights and the Cholesky factor; each has its own right
    side. The right side holds the difference to the module's anchor, as in `solve_linear`.
    """

    def __init__(self, anchors: Mapping[str, Tensor], *, mix_alpha: float, eps: float) -> None:
        """Start with no task.

        Args:
            anchors: `W_anc` of each module by name, `[m, d]`, `d` alike for all.
            mix_alpha: alpha (Eq. 10).
            eps: Stabiliser of the matrix and floor of the norms.
        """
        self._anchors = dict(anchors)
        self._mix_alpha = mix_alpha
        self._eps = eps
        self._system: tuple[Tensor, Tensor, float] | None = None
        self._system_lambda: float | None = None
        self._gram: Tensor | None = None
        self._right: dict[str, Tensor] = {}
        self._bias_right: dict[str, Tensor] = {}
        self._weighted_mean_cal: Tensor | None = None
        self.task_weights: dict[str, Tensor] = {}
        self.gram_norms: dict[str, float] = {}

    def add(
        self,
        task: str,
        moments: LinearMoments,
        expert_weights: Mapping[str, Tensor],
        expert_biases: Mapping[str, Tensor],
    ) -> None:
        """Fold one task in.

        Args:
            task: The task's name, not yet folded.
            moments: Its sums over all its rows.
            expert_weights: Its expert's weight of each module, `[m, d]`.
            expert_biases: Its expert's bias of each module whose bias is calibrated, `[m]`.

        Raises:
            ValueError: If the task was folded before.
            ZeroDivisionError: If all inputs are zero and eps is 0.
        """
        if task in self.task_weights:
            raise ValueError(f"task {task!r} was folded before")
        self._system = None
        weight = task_weight(moments, self._eps)
        mean_gram = moments.gram / moments.weight
        # C - G, so that equal features give exactly zero
        shift = self._mix_alpha * (moments.cross_exp - moments.gram) / moments.weight
        mean_cal = moments.sum_cal / moments.weight
        mean_target = moments.mean_target(self._mix_alpha)
        self._gram = _plus(self._gram, weight * mean_gram)
        self._weighted_mean_cal = _plus(self._weighted_mean_cal, weight * mean_cal)
        for name, anchor in self._anchors.items():
            expert = expert_weights[name].to(mean_gram.dtype)
            right = (expert - anchor.to(mean_gram.dtype)) @ mean_gram + expert @ shift
            self._right[name] = _plus(self._right.get(name), weight * right)
            if name in expert_biases:
                wanted = expert_biases[name].to(mean_gram.dtype) + expert @ mean_target
                self._bias_right[name] = _plus(self._bias_right.get(name), weight * wanted)
        self.task_weights[task] = weight
        self.gram_norms[task] = float(gram_norm(moments))

    def restricted(self, names: Iterable[str]) -> "FoldedLinear":
        """A copy for some of the modules, which no longer share their input with the others.

        Args:
            names: The modules that stay.

        Returns:
            The same sums for these modules; tasks added to it do not reach this object.
        """
        part = FoldedLinear(
            {name: self._anchors[name] for name in names}, mix_alpha=self._mix_alpha, eps=self._eps
        )
        part._gram = _copy(self._gram)
        part._weighted_mean_cal = _copy(self._weighted_mean_cal)
        part._right = {n: t.clone() for n, t in self._right.items() if n in part._anchors}
        part._bias_right = {n: t.clone() for n, t in self._bias_right.items() if n in part._anchors}
        part.task_weights = dict(self.task_weights)
        part.gram_norms = dict(self.gram_norms)
        return part

    def solve(self, name: str, *, ridge_lambda: float) -> LinearSolution:
        """Calibrated weight of one module (Eq. 17).

        Args:
            name: The module's name.
            ridge_lambda: lambda, >= 0. Modules solved with one lambda share the factor.

        Returns:
            The solution, as `solve_linear` returns it.

        Raises:
            UnsolvedError: If the system has no trustworthy solution.
        """
        factor, system, condition = self._factorised(ridge_lambda)
        anchor = self._anchors[name].to(system.dtype)
        right = self._right[name].to(system.dtype) - self._eps * anchor
        step, residual = solve_factorised(factor, system, right)
        return LinearSolution(
            weight=anchor + step,
            task_weights=self.task_weights,
            residual=residual,
            condition=condition,
        )

    def solve_bias(
        self, name: str, weight: Tensor, anchor: Tensor | None, *, ridge_lambda: float
    ) -> Tensor:
        """Calibrated bias of one module, given its calibrated weight (Eqs. 51-55).

        Args:
            name: The module's name.
            weight: `W*`, `[m, d]`.
            anchor: `b_anc`, `[m]`, or None: lambda is dropped on both sides.
            ridge_lambda: lambda, >= 0.

        Returns:
            `b*`, `[m]`, in the dtype of `weight`.
        """
        assert self._weighted_mean_cal is not None  # a solve follows at least one task
        right = self._bias_right[name].to(weight) - weight @ self._weighted_mean_cal.to(weight)
        total = torch.stack(list(self.task_weights.values())).to(weight).sum()
        if anchor is not None:
            right = right + ridge_lambda * anchor.to(weight)
            total = total + ridge_lambda
        return right / total

    def _factorised(self, ridge_lambda: float) -> tuple[Tensor, Tensor, float]:
        """Factor, system and condition, computed once for all modules of the group."""
        if self._system is None or self._system_lambda != ridge_lambda:
            assert self._gram is not None  # a solve follows at least one task
            system = ridge_system(self._gram, ridge_lambda=ridge_lambda, eps=self._eps)
            factor, condition = factorise(
                system, floor=ridge_lambda + self._eps, precision=self._gram.dtype
            )
            self._system = (factor, system, condition)
            self._system_lambda = ridge_lambda
        return self._system


class FoldedNorm:
    """Running sums for one LayerNorm's gain and shift (Eqs. 56-59)."""

    def __init__(self) -> None:
        """Start with no task."""
        self._sums: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._tasks = 0

    def add(self, moments: NormMoments, expert_affine: Affine) -> None:
        """Fold one task in.

        Args:
            moments: Its sums over all its rows.
            expert_affine: Its expert's gain and shift, `[d]` each.
        """
        wide = solve_dtype(moments.sum_z.device)
        weight = moments.weight.to(wide)
        second, first = moments.sum_z_sq.to(wide) / weight, moments.sum_z.to(wide) / weight
        gain, shift = (part.to(wide) for part in expert_affine)
        new = (second, first, second * gain + first * shift, first * gain + shift)
        if self._sums is not None:
            new = tuple(old + added for old, added in zip(self._sums, new, strict=True))
        self._sums = new  # type: ignore[assignment]
        self._tasks += 1

    def solve(self, anchor: Affine | None, *, ridge_lambda: float, eps: float) -> Affine:
        """Calibrated gain and shift (Eqs. 57-59), as `solve_norm` returns them."""
        assert self._sums is not None  # a solve follows at least one task
        second, first, right_gain, right_shift = self._sums
        return solve_affine(
            second,
            first,
            self._tasks,
            right_gain,
            right_shift,
            anchor,
            ridge_lambda=ridge_lambda,
            eps=eps,
        )


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)
