"""Routed experts of a mixture, calibrated one by one after the other modules of their block.

A routed expert's rows are the tokens that the calibrated model sends to it. Both models run it on
them, whatever the task expert's own router says. A task without such rows does not count, and a
routed expert without any stays as merged.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.experts import LazyModel, put_tensor
from fusion_bench_featcal.modules.groups import Group, group_of_slot
from fusion_bench_featcal.modules.mixtures import Mixture
from fusion_bench_featcal.modules.models import refuse_overflow
from fusion_bench_featcal.rules.rule import GroupSums
from fusion_bench_featcal.run.problem import Problem
from fusion_bench_featcal.run.turns import Get, add_task, empty_sums, solve, turns_of
from fusion_bench_featcal.streams.checks import Checks
from fusion_bench_featcal.streams.routed import RoutedRows
from fusion_bench_featcal.streams.task_sums import LinearTaskSums


def calibrate_mixture(problem: Problem, block: str, mixture: Mixture) -> None:
    """Calibrate the routed experts of a mixture, and log a summary of them."""
    streams, model, figures = problem.streams, problem.model, defaultdict[str, Figures](dict)
    for name in mixture.parameters:  # the merged model's own tensors are not written to
        put_tensor(model, name, model.get_parameter(name).detach().clone())
    routed = {task: streams.routed(task, block, mixture.name) for task in streams.running}
    rows = {task: of_task.by_slot(mixture.slots) for task, of_task in routed.items()}
    counts = {task: [len(numbers) for numbers in of_task] for task, of_task in rows.items()}
    of_all = problem.processes.united(counts).values()
    totals = [sum(of_slot) for of_slot in zip(*of_all, strict=True)]
    for number in (number for number, total in enumerate(totals) if total):
        problem.progress.at(f"{block} · routed expert {number} of {mixture.slots}")
        of_tasks = {
            task: routed[task].selected(of_task[number], problem.working.device)
            for task, of_task in rows.items()
            if len(of_task[number])
        }
        for name, of_slot in Slot(problem, block, mixture, number, of_tasks).calibrate().items():
            figures[name][number] = of_slot
    for module, of_module in figures.items():
        counted = {"slots": mixture.slots, "idle": totals.count(0), "rows": median(totals)}
        where = {"block": block, "module": module}
        problem.log.add("slots", {**where, **counted, **summed_up(of_module)})


Figures = dict[int, Mapping[str, float]]
"""Number of a routed expert -> figures of one of its matrices."""


def summed_up(figures: Figures) -> dict[str, float]:
    """Return the medians of all figures, and the largest update with its routed expert's number."""
    names = dict.fromkeys(name for of_slot in figures.values() for name in of_slot)
    medians = {n: median(of_slot[n] for of_slot in figures.values() if n in of_slot) for n in names}
    updates = {number: of_slot.get("relative_update", 0.0) for number, of_slot in figures.items()}
    worst = max(updates, key=updates.__getitem__)
    typical = {"median_update": medians.pop("relative_update", 0.0)}
    return medians | typical | {"relative_update": updates[worst], "largest": worst}


@dataclass(frozen=True)
class Slot:
    """One routed expert with the rows of this process's tasks that reach it.

    Attributes:
        problem: The problem.
        block: The block.
        mixture: The mixture.
        number: Number of the routed expert.
        rows: The rows of each task that has some.
    """

    problem: Problem
    block: str
    mixture: Mixture
    number: int
    rows: Mapping[str, RoutedRows]

    def calibrate(self) -> dict[str, Mapping[str, float]]:
        """Replace its parameters in the model, and return figures of each matrix."""
        problem, figures = self.problem, dict[str, Mapping[str, float]]()
        groups = [group_of_slot(site, self.number, self._current) for site in self.mixture.sites]
        for turn in turns_of(problem.rule, groups):
            sums = self._collect(turn)
            problem.processes.add_up(t for of_group in sums.values() for t in of_group.tensors())
            new, of_turn = solve(problem, self.block, sums, self._current)
            refuse_overflow(self.block, new, problem.rule.remedy)
            for name, value in new.items():
                self._current(name).copy_(value)
            figures |= of_turn
        return figures

    def _current(self, name: str) -> Tensor:
        """Return its part of a parameter of the calibrated model."""
        return self.problem.model.get_parameter(name)[self.number]

    def _of(self, model: LazyModel) -> Get:
        """Return what reads its part of a parameter of another model."""
        return lambda name: model.slot(name, self.number)

    def _collect(self, turn: Sequence[Group]) -> dict[Group, GroupSums]:
        """Return sums over the tasks for matrices that are solved in one turn."""
        problem, checks = self.problem, Checks(self.block, compares_tasks=False)
        base = None if problem.base is None else self._of(problem.base)
        sums = {group: empty_sums(problem, group, self._current, base) for group in turn}
        for task, rows in self.rows.items():
            for group in turn:
                of_task = self._sums_of(task, rows, group)
                moments = add_task(sums[group], group, self.block, task, of_task)
                checks.add(task, group.label, moments, sums[group].tensors())
        checks.run(problem.processes.gather)
        return sums

    def _sums_of(self, task: str, rows: RoutedRows, group: Group) -> LinearTaskSums:
        """Return sums over a task's rows in front of a matrix."""
        problem, site, mixture = self.problem, group.sites[0], self.mixture
        expert, module = self._of(problem.experts[task]), problem.model.get_submodule(mixture.name)
        sums = LinearTaskSums(group, group.linear(expert, problem.dtype), problem.rule)
        with group.place(self.block, task):
            with problem.streams.autocast():
                x, of_expert = mixture.input_of(site, module, self._current, rows.x), rows.expert_x
                if of_expert is not None:
                    of_expert = mixture.input_of(site, module, expert, of_expert)
            with exact_products():
                sums.add_rows(x, of_expert, rows.fitted_and_held_out, rows.weights)
        return sums
