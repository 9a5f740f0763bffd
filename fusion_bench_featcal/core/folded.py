"""Running sums of a block: one task is folded in at a time, then its own statistics are dropped.

Memory is `O(d^2)` whatever the number of tasks. Tested equal to `core.solve`, the definition.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.blocked import Product
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
from fusion_bench_featcal.core.moments import LinearMoments, weight_of_norm
from fusion_bench_featcal.core.readback import read_back
from fusion_bench_featcal.core.solve import LinearSolution
from fusion_bench_featcal.core.triangle import mirror_lower, norm_of_lower


def _times_transposed(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.T


@dataclass(frozen=True, kw_only=True)
class TaskMeans:
    """Means over one task's rows of the inputs that some linear modules share.

    The cross moment enters by its difference to the gram, `C' = G + shift`: equal features of both
    models give exactly zero, and unlike ones a small matrix with a small error.

    Attributes:
        gram: `G`, `[d, d]`, symmetric; only its lower triangle is looked at.
        shift: `(C - G)' = alpha mean(x_cal (x_exp - x_cal)')`, `[d, d]`; None: zero, or not needed.
        reached: `W_i C` of the modules for which it was summed itself, `[m, d]` by name.
        mean_cal: `mu_cal`, `[d]`.
        mean_target: `mu_tgt`, `[d]`.
        rounding: Rounding of the gram, relative to its diagonal.
    """

    gram: Float[Tensor, "d d"]
    shift: Float[Tensor, "d d"] | None
    reached: Mapping[str, Tensor]
    mean_cal: Float[Tensor, " d"]
    mean_target: Float[Tensor, " d"]
    rounding: float


@dataclass(frozen=True)
class _System:
    """The normal equations' matrix for one lambda, and its factor."""

    ridge_lambda: float
    matrix: Tensor
    factor: Factor


class FoldedLinear:
    """Running sums for the linear modules that share one input, and their solves (Eqs. 17, 51-55).

    All modules share the gram, the task weights and the Cholesky factor; each has its own right
    side. What is solved for is the difference to the module's anchor, as in `solve_linear`, whose
    right side `sum w_i (W_i C_i - W_anc G_i)` is summed as `sum w_i (W_i - W_anc) C_i` with
    `W_anc sum w_i (C_i - G_i)` added once: one product a task, and exactly zero where nothing is
    to be done.
    """

    def __init__(
        self,
        anchors: Mapping[str, Tensor],
        *,
        mix_alpha: float,
        eps: float,
        times_transposed: Product = _times_transposed,
        solves_by_products: bool = False,
    ) -> None:
        """Start with no task.

        Args:
            anchors: `W_anc` of each module by name, `[m, d]`, `d` alike for all.
            mix_alpha: alpha (Eq. 10).
            eps: Stabiliser of the matrix and floor of the norms.
            times_transposed: What multiplies, `left right'` of two matrices.
            solves_by_products: Whether it is so fast that systems in the dtype of the sums are
                solved by it, and not by LAPACK.
        """
        self._solves_by_products = solves_by_products
        self._times_transposed = times_transposed
        self._anchors = dict(anchors)
        self._mix_alpha = mix_alpha
        self._eps = eps
        self._system: _System | None = None
        self._diagonal: Tensor | None = None
        self._needs_wide = False
        self._rounding = 0.0
        self._gram: Tensor | None = None
        self._shift: Tensor | None = None
        self._right: dict[str, Tensor] = {}
        self._whole: set[str] = set()
        self._bias_right: dict[str, Tensor] = {}
        self._weighted_mean_cal: Tensor | None = None
        self.task_weights: dict[str, Tensor] = {}
        self.gram_norms: dict[str, Tensor] = {}

    def add(
        self,
        task: str,
        moments: LinearMoments,
        expert_weights: Mapping[str, Tensor],
        expert_biases: Mapping[str, Tensor],
    ) -> None:
        """Fold one task in, given its sums.

        Args:
            task: The task's name, not yet folded.
            moments: Its sums over all its rows.
            expert_weights: Its expert's weight of each module, `[m, d]`.
            expert_biases: Its expert's bias of each module whose bias is calibrated, `[m]`.

        Raises:
            ValueError: If the task was folded before.
            ZeroDivisionError: If all inputs are zero and eps is 0.
        """
        means = TaskMeans(
            gram=moments.gram / moments.weight,
            shift=self._mix_alpha * (moments.cross_exp - moments.gram).T / moments.weight,
            reached={},
            mean_cal=moments.sum_cal / moments.weight,
            mean_target=moments.mean_target(self._mix_alpha),
            rounding=torch.finfo(moments.gram.dtype).eps,
        )
        self.add_means(task, means, expert_weights, expert_biases)

    def add_means(
        self,
        task: str,
        means: TaskMeans,
        expert_weights: Mapping[str, Tensor],
        expert_biases: Mapping[str, Tensor],
    ) -> None:
        """Fold one task in, given its means; otherwise as `add`.

        The first task's are used up: they become the sums. Later ones may be shared with others.
        """
        if task in self.task_weights:
            raise ValueError(f"task {task!r} was folded before")
        self._drop_system()
        norm = norm_of_lower(means.gram)
        weight = weight_of_norm(norm, self._eps)
        if not self.task_weights:
            self._whole = set(means.reached)
        is_whole = set(self._anchors) <= self._whole
        if not (is_whole and set(self._anchors) <= set(means.reached)):
            mirror_lower(means.gram)  # products with it are needed
        cross = means.gram if means.shift is None else means.gram + means.shift
        for name in self._anchors:
            expert = expert_weights[name].to(cross.dtype)
            right = self._right_side(name, means, expert, cross)
            self._right[name] = _add_weighted(self._right.get(name), right, weight)
            if name in expert_biases:
                wanted = expert_biases[name].to(cross.dtype) + expert @ means.mean_target
                self._bias_right[name] = _add_weighted(self._bias_right.get(name), wanted, weight)
        # These come last, as the first task's are changed.
        self._gram = _add_weighted(self._gram, means.gram, weight)
        self._weighted_mean_cal = _add_weighted(self._weighted_mean_cal, means.mean_cal, weight)
        if means.shift is not None and not is_whole:  # else nothing will ask for it
            is_shared = self._shift is None and bool(self.task_weights)
            shift = means.shift.clone() if is_shared else means.shift
            self._shift = _add_weighted(self._shift, shift, weight)
        self._rounding = max(self._rounding, means.rounding)
        self.task_weights[task] = weight
        self.gram_norms[task] = norm

    def _right_side(self, name: str, means: TaskMeans, expert: Tensor, cross: Tensor) -> Tensor:
        """One task's `W_i C_i`, without what `_complete` will add for all tasks."""
        times = self._times_transposed
        reached = means.reached.get(name)
        if name in self._whole:
            return times(expert, cross) if reached is None else reached
        anchor = self._anchors[name].to(cross.dtype)
        if reached is None:
            return times(expert - anchor, cross)
        return reached - times(anchor, means.gram)

    def restricted(self, names: Iterable[str]) -> "FoldedLinear":
        """A copy for some of the modules, which no longer share their input with the others.

        Args:
            names: The modules that stay.

        Returns:
            The same sums for these modules; tasks added to it do not reach this object.
        """
        self._drop_system()
        part = FoldedLinear(
            {name: self._anchors[name] for name in names},
            mix_alpha=self._mix_alpha,
            eps=self._eps,
            times_transposed=self._times_transposed,
            solves_by_products=self._solves_by_products,
        )
        part._gram, part._shift = _copy(self._gram), _copy(self._shift)
        part._rounding, part._whole = self._rounding, self._whole & set(part._anchors)
        part._weighted_mean_cal = _copy(self._weighted_mean_cal)
        part._right = {n: t.clone() for n, t in self._right.items() if n in part._anchors}
        part._bias_right = {n: t.clone() for n, t in self._bias_right.items() if n in part._anchors}
        part.task_weights = dict(self.task_weights)
        part.gram_norms = dict(self.gram_norms)
        return part

    def tensors(self) -> list[Tensor]:
        """The sums, to which those of further tasks may be added in place, in a fixed order.

        What the anchor adds is in them then. No task can be folded in any more; the number of
        tensors and their shapes depend on the modules alone.
        """
        self._drop_system()
        self._complete()
        assert self._gram is not None  # there is at least one task
        assert self._weighted_mean_cal is not None
        biases = [self._bias_right[name] for name in self._anchors if name in self._bias_right]
        rights = [self._right[name] for name in self._anchors]
        return [self._gram, self._weighted_mean_cal, *rights, *biases]

    def adopt(self, weights: Mapping[str, float]) -> None:
        """Take over the weights of all tasks whose sums were added.

        Args:
            weights: `w_i` of each task.
        """
        assert self._gram is not None  # there is at least one task
        self.gram_norms = {}  # those of the tasks that were folded here say nothing any more
        self.task_weights = {task: self._gram.new_full((), w) for task, w in weights.items()}

    def solve(self, name: str, *, ridge_lambda: float) -> LinearSolution:
        """Calibrated weight of one module (Eq. 17).

        Args:
            name: The module's name.
            ridge_lambda: lambda, >= 0. Modules solved with one lambda share the factor.

        Returns:
            The solution, as `solve_linear` returns it; its dtype tells what was solved in.

        Raises:
            UnsolvedError: If the system has no trustworthy solution.
        """
        while True:
            weight, residual = self.propose(name, ridge_lambda=ridge_lambda)
            checked = self.check({name: residual})
            if checked is not None:
                condition, residuals = checked
                return LinearSolution(
                    weight=weight,
                    task_weights=self.task_weights,
                    residual=residuals[name],
                    condition=condition,
                )

    def propose(self, name: str, *, ridge_lambda: float) -> tuple[Tensor, Tensor]:
        """Calibrated weight of one module, unchecked: on a GPU the host need not wait for it.

        Float32 sums are solved in float32 where lambda bounds the condition (`SINGLE_LAMBDA`).

        Args:
            name: The module's name.
            ridge_lambda: lambda, >= 0. Modules solved with one lambda share the factor.

        Returns:
            `W*`, `[m, d]`, and the relative residual of its system, a scalar: `check` takes it.
        """
        dtype = solve_dtype(self._anchors[name].device)
        if ridge_lambda >= SINGLE_LAMBDA and not self._needs_wide:
            dtype = self._right[name].dtype
        system = self._factorised(ridge_lambda, dtype)
        anchor = self._anchors[name].to(dtype)
        right = self._right[name].to(dtype) - self._eps * anchor
        step, residual = solve_factorised(
            system.factor.lower, system.matrix, right, self._product_for(dtype)
        )
        return step.add_(anchor), residual

    def check(self, residuals: Mapping[str, Tensor]) -> tuple[float, dict[str, float]] | None:
        """Look at what was proposed for some modules, all at once.

        Args:
            residuals: Each module's, from `propose` with one lambda.

        Returns:
            The condition of their system and the residuals; None where float32 was not enough: they
            are to be proposed anew, and will be solved in float64.

        Raises:
            UnsolvedError: If the system has no trustworthy solution, naming the module.
        """
        system = self._system
        assert system is not None and self._gram is not None  # there was a proposal
        values = read_back([system.factor.signs, *residuals.values()])
        found = dict(zip(residuals, values[Factor.SIGNS :], strict=True))
        name = next(iter(found))
        try:
            condition = trusted_condition(
                values[: Factor.SIGNS],
                size=len(self._gram),
                floor=system.ridge_lambda + self._eps,
                rounding=self._rounding,
            )
            for name, residual in found.items():  # noqa: B007
                check_residual(residual, system.matrix.dtype)
        except UnsolvedError as error:
            if system.matrix.dtype == solve_dtype(self._gram.device):
                error.module = name
                raise
            self._drop_system()
            self._needs_wide = True
            return None
        return condition, found

    def _complete(self) -> None:
        """Add what the anchor adds to the right sides, from the sums over all tasks."""
        assert self._gram is not None  # there is at least one task
        if self._whole:
            mirror_lower(self._gram)
        for name, right in self._right.items():
            moment = self._gram if name in self._whole else self._shift
            if moment is not None:
                part = self._times_transposed(self._anchors[name].to(moment.dtype), moment)
                right.add_(part, alpha=-1 if name in self._whole else 1)
        self._shift, self._whole = None, set()

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
            `b*`, `[m]`, in float64 where the device has it: its two parts nearly cancel.
        """
        assert self._weighted_mean_cal is not None  # a solve follows at least one task
        wide = solve_dtype(weight.device)
        right = self._bias_right[name].to(wide) - weight.to(wide) @ self._weighted_mean_cal.to(wide)
        total = torch.stack(list(self.task_weights.values())).to(wide).sum()
        if anchor is not None:
            right = right + ridge_lambda * anchor.to(wide)
            total = total + ridge_lambda
        return right / total

    def _factorised(self, ridge_lambda: float, dtype: torch.dtype) -> _System:
        """System and factor, computed once for all modules of the group.

        In the dtype of the sums the gram itself becomes the system, until `_drop_system`.
        """
        known = self._system
        if known is None or (known.ridge_lambda, known.matrix.dtype) != (ridge_lambda, dtype):
            self._drop_system()
            self._complete()
            assert self._gram is not None  # a solve follows at least one task
            self._diagonal = self._gram.diagonal().clone()
            matrix = ridge_system(self._gram, ridge_lambda=ridge_lambda, eps=self._eps, dtype=dtype)
            factor = factor_of(matrix, self._product_for(dtype))
            known = self._system = _System(ridge_lambda, matrix, factor)
        return known

    def _product_for(self, dtype: torch.dtype) -> Product | None:
        """What systems in a dtype are solved by; None: LAPACK."""
        assert self._gram is not None  # a solve follows at least one task
        fast = self._solves_by_products and dtype == self._gram.dtype
        return self._times_transposed if fast else None

    def _drop_system(self) -> None:
        """Turn the system back into the gram."""
        if self._diagonal is not None and self._gram is not None:
            self._gram.diagonal().copy_(self._diagonal)
        self._system = self._diagonal = None


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _add_weighted(total: Tensor | None, part: Tensor, weight: Tensor) -> Tensor:
    return part.mul_(weight) if total is None else total.addcmul_(part, weight)
