"""One block: running sums over tasks, and the updates solved from them."""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core import LinearSystem, NormSystem, UnsolvedError, extrapolate_anchor
from fusion_bench_featcal.core.finite import not_finite, read_back
from fusion_bench_featcal.core.grouped import GroupedSystem
from fusion_bench_featcal.engine.checks import DeferredCheck, run_checks
from fusion_bench_featcal.engine.mixtures import FEWEST_ROWS
from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.settings import CalibrationError

DEAD_TASK_RATIO = 1e-6
"""A task whose gram norm is below this share of the median task's would swamp the bias."""

Names = tuple[str, ...]
"""A group of linear modules that share their inputs."""

Tally = tuple[float, float, float | None]
"""A task's weight and gram norm for the modules of one group, and the rows of routed ones."""

Tallies = Mapping[str, Mapping[Names, Tally]]
"""By task, then by group of modules."""


class BlockSums:
    """Running sums of one block over tasks, and its solve.

    Attributes:
        block: The block's name.
        linear: Sums by group of linear modules that share their inputs.
        norm: Sums by LayerNorm.
    """

    def __init__(self, problem: Problem, block: str) -> None:
        """Start with no task.

        Args:
            problem: The problem, whose model still has the merged parameters of this block.
            block: The block's name.
        """
        self.block = block
        self.linear: dict[Names, LinearSystem | GroupedSystem] = {}
        self.norm: dict[str, NormSystem] = {}
        self._problem = problem
        self._settings = problem.settings
        self._equal = problem.settings.task_weights == "equal"
        self._sites = {site.name: site for site in problem.modules[block].sites}
        self._checks: list[DeferredCheck] = []
        self._tasks: list[str] = []
        self._rows: dict[tuple[str, Names], float] = {}
        self._anchors: dict[str, Tensor] = {}
        self._bias_anchors: dict[str, Tensor] = {}

    def add(self, sums: TaskSums, expert: nn.Module) -> None:
        """Fold one task in.

        Args:
            sums: The task's sums, which are used up.
            expert: Its expert, with this block's parameters loaded.

        Raises:
            CalibrationError: If modules share their input in this task and not in others, or all
                inputs are 0 and eps is too. Sums that are empty or not finite are refused by
                `tallies`.
        """
        if not self._tasks:
            self._begin(list(sums.linear))
        self._checks += sums.deferred_checks()
        few = self._few(sums)
        self._tasks.append(sums.task)
        refuse_other_groups(f"task {sums.task}, block {self.block}", sums.linear, self.linear)
        for names, system in self.linear.items():
            sites = [self._sites[name] for name in names]
            get, biased = expert.get_parameter, self._settings.calibrate_bias
            weights = {site.name: site.oriented(get(site.weight_name)) for site in sites}
            biases = {s.name: get(s.bias_name) for s in sites if s.has_bias and biased}
            try:
                means: Any = sums.linear.pop(names).means()
                absent = {"absent": True} if names in few else {}  # only a router sends few rows
                system.fold(sums.task, means, weights, biases, **absent)
            except ZeroDivisionError as error:  # only where eps is 0 and every input is too
                raise CalibrationError(
                    f"task {sums.task}, block {self.block}, module {names[0]}: {error}. Check "
                    f"modelpool.models.{sums.task} and its calibration data, or drop the task"
                ) from error
        for name, moments in sums.norm.items():
            site = self._sites[name]
            affine = expert.get_parameter(site.weight_name), expert.get_parameter(site.bias_name)
            self.norm.setdefault(name, NormSystem()).fold(moments, affine)

    def _few(self, sums: TaskSums) -> set[Names]:
        """Routed modules that too few rows of a task reach; what there is of these is dropped."""
        routed = [names for names in sums.linear if self._sites[names[0]].routed]
        rows = read_back([sums.linear[names].weight for names in routed])
        self._rows |= {(sums.task, n): count for n, count in zip(routed, rows, strict=True)}
        few = {names for names in routed if self._rows[sums.task, names] < FEWEST_ROWS}
        for names in few:
            for tensor in sums.linear[names].tensors():
                tensor.zero_()
            sums.linear[names].weight.fill_(1)
        return few

    def _begin(self, groups: Sequence[Names]) -> None:
        """Make the anchors, before the first task is folded in."""
        for name, site in self._sites.items():
            self._anchors[name] = site.oriented(self._anchor(site.weight_name))
            if site.has_bias:
                self._bias_anchors[name] = self._anchor(site.bias_name)
        self.linear = {names: self._system(names) for names in groups}

    def _system(self, names: Names) -> LinearSystem | GroupedSystem:
        groups, eps = self._sites[names[0]].groups, self._settings.eps
        if groups > 1:
            anchor = self._anchors[names[0]]
            return GroupedSystem(names[0], anchor, groups, eps=eps, equal_weights=self._equal)
        anchors = {name: self._anchors[name] for name in names}
        return LinearSystem(anchors, eps=eps, equal_weights=self._equal)

    def _anchor(self, name: str) -> Tensor:
        base, rho = self._problem.base, self._settings.anchor_rho
        merged = self._problem.model.get_parameter(name).detach()
        start = base.tensor(name) if base and rho != 1 else None
        dtype = torch.promote_types(merged.dtype, self._problem.fold_dtype)
        return extrapolate_anchor(merged, start, rho).to(dtype)

    def tallies(self) -> Tallies:
        """Each task's weight and gram norm for every group of modules that it had.

        The one host-device synchronisation of a block's sums.

        Raises:
            CalibrationError: If a sum is empty or not finite.
        """
        folded = [
            (task, names, (system.task_weights[task], norm))
            for names, system in self.linear.items()
            for task, norm in system.gram_norms.items()
        ]
        scalars = [scalar for *_, pair in folded for scalar in pair]
        numbers = iter(run_checks(self._checks, scalars))
        tallies: dict[str, dict[Names, Tally]] = {task: {} for task in self._tasks}
        for task, names, _ in folded:
            rows = self._rows.get((task, names))
            tallies[task][names] = (next(numbers), next(numbers), rows)
        return tallies

    def cost(self, names: Sequence[str]) -> float:
        """Multiplications that solving some modules that share their inputs takes."""
        groups = self._sites[names[0]].groups
        return cost_of_solving([self._anchors[name] for name in names], groups)

    def solve(
        self, tallies: Tallies | None = None
    ) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Solve every module from the one snapshot that was summed.

        Args:
            tallies: Tallies of all tasks; None: those of the tasks that were folded here.

        Returns:
            New parameters by name, as they are stored, and a log record for each linear module.

        Raises:
            CalibrationError: If a task is dead or a system has no trustworthy solution, naming
                block, module and the setting to change.
        """
        tallies = self.tallies() if tallies is None else tallies
        updates: dict[str, Tensor] = {}
        records: list[dict[str, Any]] = []
        while self.linear:  # a group's sums and factor are let go when it is solved
            names = next(iter(self.linear))
            weights = {task: groups[names][0] for task, groups in tallies.items()}
            norms = {task: groups[names][1] for task, groups in tallies.items() if weights[task]}
            rows = {task: groups[names][2] for task, groups in tallies.items()}
            if not norms:
                del self.linear[names]
                records += [self._left(name, rows) for name in names]
                continue
            self._refuse_dead_tasks(names[0], norms)
            try:
                strength = self._settings.ridge_lambda
                system = self.linear.pop(names)
                if self._equal:
                    strength *= statistics.fmean(norms.values()) / math.sqrt(system.groups)
                solved = self._solve_group(system, strength, updates)
            except UnsolvedError as error:
                raise CalibrationError(
                    f"block {self.block}, module {error.module}: {error}. Raise "
                    f"method.ridge_lambda (now {self._settings.ridge_lambda}) or "
                    f"method.samples_per_task (now {self._settings.samples_per_task})"
                ) from error
            noted = {"rows": rows} if self._sites[names[0]].routed else {}
            records += [{**record, "task_weights": weights, **noted} for record in solved]
        for name, norm in self.norm.items():
            anchor = self._anchors[name], self._bias_anchors[name]
            gain, shift = norm.solve(
                anchor, ridge_lambda=self._settings.ridge_lambda, eps=self._settings.eps
            )
            updates[self._sites[name].weight_name] = gain
            updates[self._sites[name].bias_name] = shift
        return updates, records

    def _left(self, name: str, rows: Mapping[str, float | None]) -> dict[str, Any]:
        """The log record of a module that stays as merged: too few rows of every task reach it."""
        return {"kind": "routed", "block": self.block, "module": name, "rows": dict(rows)}

    def _solve_group(
        self, system: LinearSystem | GroupedSystem, ridge_lambda: float, updates: dict[str, Tensor]
    ) -> list[dict[str, Any]]:
        """Solve the modules that share their inputs; their log records."""
        # Rounded at once, so that a group's solutions take no more memory than they will.
        names = {name: self._sites[name].weight_name for name in system.names}
        dtypes = {name: self._problem.model.get_parameter(names[name]).dtype for name in names}
        solution = system.solve(ridge_lambda, dtypes)
        for name, stored in solution.weights.items():
            site = self._sites[name]
            updates[site.weight_name] = site.stored(stored)
            if site.has_bias and self._settings.calibrate_bias:
                # From the rounded weight: the bias makes up for its rounding too.
                anchor = self._bias_anchors[name]
                updates[site.bias_name] = system.solve_bias(name, stored, anchor, ridge_lambda)
        return [
            {"block": self.block, "module": n, "residual": r, "condition": solution.condition}
            for n, r in solution.residuals.items()
        ]

    def _refuse_dead_tasks(self, module: str, norms: Mapping[str, float]) -> None:
        median = statistics.median(norms.values())
        for task, norm in norms.items():
            if norm < DEAD_TASK_RATIO * median:
                raise CalibrationError(
                    f"task {task}, block {self.block}, module {module}: its inputs are almost "
                    f"zero (gram norm {norm:.1e}, median task {median:.1e}), so its weight would "
                    f"swamp the bias. Check modelpool.models.{task} and its calibration data, or "
                    "drop the task"
                )


def cost_of_solving(weights: Sequence[Tensor], groups: int) -> float:
    """Multiplications that solving modules with one input takes.

    Args:
        weights: Their weights, `[m, d]` each.
        groups: Number of linear maps that they are made of, each of its own inputs.
    """
    width = weights[0].shape[1]
    return groups * width**3 / 6 + sum(map(len, weights)) * width**2


def refuse_other_groups(place: str, groups: Iterable[Names], first: Collection[Names]) -> None:
    """Refuse a task in which other modules share their input than in the first one.

    Args:
        place: Task and block, for the message.
        groups: Groups of modules in the task.
        first: Groups of modules in the first task.

    Raises:
        CalibrationError: If they differ, naming the modules.
    """
    for names in groups:
        if names not in first:
            raise CalibrationError(
                f"{place}: modules {', '.join(names)} share their input otherwise than in the "
                f"first task, which is not supported. Exclude them: "
                f"method.modules=['!{names[0]}', ...]"
            )


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
    checks: list[DeferredCheck] = []
    tensors = model.state_dict()  # statistics are no parameters
    for name, value in updates.items():
        parameter = tensors[name]
        new = value.to(parameter.dtype)
        error = CalibrationError(
            f"block {block}: the new {name} is not finite in {parameter.dtype}. Raise "
            "method.ridge_lambda, or merge in a wider dtype"
        )
        checks.append(DeferredCheck(not_finite(new), error))
        cast.append((parameter, new))
    run_checks(checks)
    with torch.no_grad():
        for parameter, new in cast:
            parameter.copy_(new)
