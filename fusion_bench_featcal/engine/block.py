"""One block: running sums over tasks, and the updates solved from them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core import FoldedLinear, FoldedNorm, UnsolvedError, extrapolate_anchor
from fusion_bench_featcal.core.finite import not_finite
from fusion_bench_featcal.core.moments import MOMENT_DTYPE
from fusion_bench_featcal.engine.doubts import Doubt, refuse_doubtful
from fusion_bench_featcal.engine.modules import Site
from fusion_bench_featcal.engine.products import times_transposed
from fusion_bench_featcal.engine.spares import Spares
from fusion_bench_featcal.engine.task_sums import TaskSums, common_parts
from fusion_bench_featcal.experts import ExpertModel
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

DEAD_TASK_RATIO = 1e-6
"""A task whose gram norm is below this share of the median task's would swamp the bias."""

_ANCHOR_ROWS = 64

Tally = tuple[float, float]
"""A task's weight and gram norm for the modules of one group."""

Tallies = Mapping[str, Mapping[tuple[str, ...], Tally]]
"""By task, then by group of modules."""


class BlockSums:
    """Running sums of one block over tasks, and its solve.

    Attributes:
        linear: Sums by group of linear modules (their names) that share their inputs.
        norm: Sums by LayerNorm.
        spares: Memory of tasks that were folded in, for the next one's sums.
    """

    def __init__(
        self,
        block: str,
        sites: Sequence[Site],
        model: nn.Module,
        base: ExpertModel | None,
        settings: FeatCalSettings,
        dtype: torch.dtype = MOMENT_DTYPE,
    ) -> None:
        """Start with no task.

        Args:
            block: The block's name.
            sites: Its calibrated modules.
            model: The calibrated model, whose block still has the merged parameters.
            base: The base; None needs `anchor_rho` 1, where every anchor is the merged parameter.
            settings: Settings.
            dtype: Least precise dtype of anchors and of the tasks' means.
        """
        self._block = block
        self._sites = {site.name: site for site in sites}
        self._model = model
        self._settings = settings
        self._dtype = dtype
        self._doubts: list[Doubt] = []
        self._anchors = {s.name: self._anchor(s.weight_name, base, s) for s in sites}
        self._bias_anchors = {
            s.name: self._anchor(s.bias_name, base, None) for s in sites if s.has_bias
        }
        self.linear: dict[tuple[str, ...], FoldedLinear] = {}
        self.norm: dict[str, FoldedNorm] = {}
        self._groups: dict[str, list[tuple[str, ...]]] = {}
        self.spares = Spares()

    def _anchor(self, name: str, base: ExpertModel | None, site: Site | None) -> Tensor:
        rho = self._settings.anchor_rho
        merged = self._model.get_parameter(name).detach()
        start = base.tensor(name) if base and rho != 1 else None
        anchor = torch.empty_like(merged, dtype=torch.promote_types(merged.dtype, self._dtype))
        for first in range(0, len(merged), _ANCHOR_ROWS):  # in float64, so a part at a time
            rows = slice(first, first + _ANCHOR_ROWS)
            own = None if start is None else start[rows]
            anchor[rows] = extrapolate_anchor(merged[rows], own, rho)
        return site.oriented(anchor) if site is not None else anchor

    def add(self, sums: TaskSums, expert: nn.Module) -> None:
        """Fold one task in.

        Args:
            sums: The task's sums.
            expert: Its expert, with this block's parameters loaded.

        Raises:
            CalibrationError: If all inputs are 0 and eps is too. Sums that are empty or not finite
                are refused by `tallies`.
        """
        self._doubts += sums.doubts()
        if not self.linear:
            self.linear = {names: self._empty(names) for names in sums.linear}
        self._groups[sums.task] = list(sums.linear)
        parts = common_parts(self.linear, sums.linear)
        self.restrict([names for names, _, _ in parts])
        means = {theirs: sums.linear[theirs].means() for theirs in sums.linear}
        for names, _, theirs in parts:
            weights = {name: self._expert_weight(expert, name) for name in names}
            biases = {
                name: expert.get_parameter(self._sites[name].bias_name)
                for name in names
                if self._sites[name].has_bias and self._settings.calibrate_bias
            }
            try:
                self.linear[names].add_means(sums.task, means[theirs], weights, biases)
            except ZeroDivisionError as error:  # only where eps is 0 and every input is too
                raise CalibrationError(
                    f"task {sums.task}, block {self._block}, module {names[0]}: {error}. Check "
                    f"modelpool.models.{sums.task} and its calibration data, or drop the task"
                ) from error
        if len(self._groups) > 1:  # the first task's have become the block's
            self.spares.give(square for s in sums.linear.values() for square in s.squares())
        for name, moments in sums.norm.items():
            affine = self._affine(expert, name)
            self.norm.setdefault(name, FoldedNorm()).add(moments, affine)

    def restrict(self, parts: Sequence[tuple[str, ...]]) -> None:
        """Let fewer modules share their sums.

        Args:
            parts: Groups of modules, each within one of the groups there are.
        """
        groups = {name: (names, sums) for names, sums in self.linear.items() for name in names}
        self.linear = {
            part: sums if part == names else sums.restricted(part)
            for part in parts
            for names, sums in [groups[part[0]]]
        }

    def tallies(self) -> Tallies:
        """Each task's weight and gram norm for every group of modules that it had.

        The host looks at what the device has summed here, all at once.

        Raises:
            CalibrationError: If a sum is empty or not finite.
        """
        sums = {name: folded for names, folded in self.linear.items() for name in names}
        known = [(task, names) for task, groups in self._groups.items() for names in groups]
        numbers = [
            number
            for task, names in known
            for folded in [sums[names[0]]]
            for number in (folded.task_weights[task], folded.gram_norms[task])
        ]
        self.spares.clear()
        told = iter(refuse_doubtful(self._doubts, numbers))
        found: dict[str, dict[tuple[str, ...], Tally]] = {task: {} for task in self._groups}
        for task, names in known:
            found[task][names] = (next(told), next(told))
        return found

    def cost(self, names: Sequence[str]) -> float:
        """What solving some modules that share their inputs takes, in multiplications."""
        width = self._anchors[names[0]].shape[1]
        return solve_cost(width, [len(self._anchors[name]) for name in names])

    def _empty(self, names: tuple[str, ...]) -> FoldedLinear:
        anchors = {name: self._anchors[name] for name in names}
        return FoldedLinear(
            anchors,
            mix_alpha=self._settings.mix_alpha,
            eps=self._settings.eps,
            times_transposed=times_transposed,
            solves_by_products=are_products_faster(next(iter(anchors.values()))),
        )

    def _expert_weight(self, expert: nn.Module, name: str) -> Tensor:
        site = self._sites[name]
        return site.oriented(expert.get_parameter(site.weight_name))

    def _affine(self, model: nn.Module, name: str) -> tuple[Tensor, Tensor]:
        site = self._sites[name]
        return model.get_parameter(site.weight_name), model.get_parameter(site.bias_name)

    def solve(self, tallies: Tallies) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Solve every module from the one snapshot that was summed.

        Args:
            tallies: Of all tasks, those of other processes too.

        Returns:
            New parameters by name, as they are stored, and a log record for each linear module.

        Raises:
            CalibrationError: If a task is dead or a system has no trustworthy solution, naming
                block, module and the setting to change.
        """
        updates: dict[str, Tensor] = {}
        records: list[dict[str, Any]] = []
        while self.linear:  # a group's sums and factor are let go when it is solved
            names = next(iter(self.linear))
            found = {task: tally_of(names, groups) for task, groups in tallies.items()}
            self._refuse_dead_tasks(names[0], {task: norm for task, (_, norm) in found.items()})
            weights = {task: weight for task, (weight, _) in found.items()}
            try:
                solved = self._solve_group(names, self.linear.pop(names), updates)
            except UnsolvedError as error:
                raise CalibrationError(
                    f"block {self._block}, module {error.module}: {error}. Raise "
                    f"method.ridge_lambda (now {self._settings.ridge_lambda}) or "
                    f"method.samples_per_task (now {self._settings.samples_per_task})"
                ) from error
            records += [{**record, "task_weights": weights} for record in solved]
        for name, folded_norm in self.norm.items():
            anchor = self._anchors[name], self._bias_anchors[name]
            gain, shift = folded_norm.solve(
                anchor, ridge_lambda=self._settings.ridge_lambda, eps=self._settings.eps
            )
            updates[self._sites[name].weight_name] = gain
            updates[self._sites[name].bias_name] = shift
        return updates, records

    def _solve_group(
        self, names: Sequence[str], folded: FoldedLinear, updates: dict[str, Tensor]
    ) -> list[dict[str, Any]]:
        """Solve the modules that share their inputs; the host looks at them once."""
        checked = None
        while checked is None:  # where float32 was not enough, once more in float64
            residuals = {name: self._propose(name, folded, updates) for name in names}
            checked = folded.check(residuals)
        condition, found = checked
        return [
            {"block": self._block, "module": n, "residual": found[n], "condition": condition}
            for n in names
        ]

    def _propose(self, name: str, folded: FoldedLinear, updates: dict[str, Tensor]) -> Tensor:
        """Compute a module's new parameters; the residual that decides on them."""
        site, ridge_lambda = self._sites[name], self._settings.ridge_lambda
        weight, residual = folded.propose(name, ridge_lambda=ridge_lambda)
        stored = weight.to(self._model.get_parameter(site.weight_name).dtype)
        updates[site.weight_name] = site.oriented(stored)
        if site.has_bias and self._settings.calibrate_bias:
            # From the rounded weight: the bias makes up for its rounding too.
            updates[site.bias_name] = folded.solve_bias(
                name, stored, self._bias_anchors[name], ridge_lambda=ridge_lambda
            )
        return residual

    def _refuse_dead_tasks(self, module: str, norms: Mapping[str, float]) -> None:
        median = statistics.median(norms.values())
        for task, norm in norms.items():
            if norm < DEAD_TASK_RATIO * median:
                raise CalibrationError(
                    f"task {task}, block {self._block}, module {module}: its inputs are almost "
                    f"zero (gram norm {norm:.1e}, median task {median:.1e}), so its weight would "
                    f"swamp the bias. Check modelpool.models.{task} and its calibration data, or "
                    "drop the task"
                )


def are_products_faster(like: Tensor) -> bool:
    """Whether products of float32 matrices are faster than LAPACK: on CPUs by a fourth and more."""
    return like.is_cpu and like.dtype == torch.float32


def solve_cost(width: int, outputs: Iterable[int]) -> float:
    """What a factor and the solutions of some modules take, in multiplications."""
    return width**3 / 6 + sum(outputs) * width**2


def tally_of(part: Sequence[str], groups: Mapping[tuple[str, ...], Tally]) -> Tally:
    """A task's tally for modules that share their input with more in that task."""
    return next(tally for names, tally in groups.items() if part[0] in names)


def load_updates(model: nn.Module, block: str, updates: Mapping[str, Tensor]) -> None:
    """Write a block's new parameters, all or none, in the model's own dtype.

    Args:
        model: The calibrated model.
        block: The block's name, for messages.
        updates: New parameters by name.

    Raises:
        CalibrationError: If a value does not fit the parameter's dtype.
    """
    cast: list[tuple[Tensor, Tensor]] = []
    doubts: list[Doubt] = []
    for name, value in updates.items():
        parameter = model.get_parameter(name)
        new = value.to(parameter.dtype)
        error = CalibrationError(
            f"block {block}: the new {name} is not finite in {parameter.dtype}. Raise "
            "method.ridge_lambda, or merge in a wider dtype"
        )
        doubts.append(Doubt(not_finite(new), error))
        cast.append((parameter, new))
    refuse_doubtful(doubts)
    with torch.no_grad():
        for parameter, new in cast:
            parameter.copy_(new)
