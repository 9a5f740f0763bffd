"""Routed experts of a mixture, calibrated one by one after the other modules of their block.

The rows of a routed expert are the tokens that the calibrated model's router sends to it. Model and
task expert both run it on these tokens, independently of the task expert's own router. A task
without such tokens does not count, and a routed expert without any token is left unchanged.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.experts import LazyModel, set_module_tensor
from fusion_bench_featcal.modules.groups import Group, group_of
from fusion_bench_featcal.modules.mixtures import Mixture
from fusion_bench_featcal.modules.models import refuse_overflow
from fusion_bench_featcal.rules.rule import GroupSums
from fusion_bench_featcal.run.state import CalibrationState
from fusion_bench_featcal.run.turns import TensorGetter, add_task, empty_sums, solve, turns_of
from fusion_bench_featcal.streams.checks import Checks
from fusion_bench_featcal.streams.routed import RoutedRows
from fusion_bench_featcal.streams.task_sums import LinearTaskSums


def calibrate_mixture(state: CalibrationState, block: str, mixture: Mixture) -> None:
    """Calibrate the routed experts of a mixture, and log a summary of them."""
    streams, model, metrics = state.streams, state.model, defaultdict[str, SlotMetrics](dict)
    device = state.working.device
    for name in mixture.parameters:  # the merged model's own tensors are not written to
        set_module_tensor(model, name, model.get_parameter(name).detach().clone())
    routed = {task: streams.routed(task, block, mixture.name) for task in streams.active_tasks}
    rows = {
        (task, number): numbers
        for task, task_rows in routed.items()
        for number, numbers in enumerate(task_rows.by_slot(mixture.slots) if task_rows else ())
        if len(numbers)
    }
    counts = state.processes.sum_counts({key: len(numbers) for key, numbers in rows.items()})
    totals = [sum(counts.get((t, n), 0) for t in state.tasks) for n in range(mixture.slots)]
    numbers = [number for number, total in enumerate(totals) if total]
    for start in range(0, len(numbers), size := state.processes.size):
        experts = list[RoutedExpert]()
        for number in numbers[start : start + size]:
            rows_here = dict[str, RoutedRows | None]()
            for task in (task for task in streams.active_tasks if (task, number) in counts):
                selected, task_rows = rows.get((task, number)), routed[task]
                rows_here[task] = None
                if selected is not None and task_rows is not None:
                    rows_here[task] = task_rows.selected(selected, device)
            experts.append(RoutedExpert(state, block, mixture, number, rows_here))
        description = f"{block} · routed expert {numbers[start]} of {mixture.slots}"
        state.progress.set_description(description)
        for (number, name), slot_values in calibrate_together(experts, state).items():
            metrics[name][number] = slot_values
    for module, module_metrics in metrics.items():
        counted = {"slots": mixture.slots, "idle": totals.count(0), "rows": median(totals)}
        where = {"block": block, "module": module}
        state.log.add("slots", {**where, **counted, **slot_summary(module_metrics)})


SlotMetrics = dict[int, Mapping[str, float]]
"""Index of a routed expert -> metrics of one of its matrices."""


def slot_summary(metrics: SlotMetrics) -> dict[str, float]:
    """Return the medians of all metrics, and the largest update with its routed expert's index."""
    names = dict.fromkeys(name for slot_values in metrics.values() for name in slot_values)
    values = {name: [m[name] for m in metrics.values() if name in m] for name in names}
    medians = {name: median(numbers) for name, numbers in values.items()}
    updates = {number: m.get("relative_update", 0.0) for number, m in metrics.items()}
    worst = max(updates, key=updates.__getitem__)
    typical = {"median_update": medians.pop("relative_update", 0.0)}
    return medians | typical | {"relative_update": updates[worst], "largest": worst}


@dataclass(frozen=True)
class RoutedExpert:
    """One routed expert with the rows of this process that reach it.

    Attributes:
        state: The calibration.
        block: The block.
        mixture: The mixture.
        number: Number of the routed expert.
        rows: The rows of each task that has some, None if only other processes have them.
    """

    state: CalibrationState
    block: str
    mixture: Mixture
    number: int
    rows: Mapping[str, RoutedRows | None]

    @property
    def turns(self) -> list[Sequence[Group]]:
        """The rule's turns over its matrices."""
        sites = self.mixture.sites
        groups = [group_of((site,), self.current, site.name, self.number) for site in sites]
        return turns_of(self.state.rule, groups)

    def current(self, name: str) -> Tensor:
        """Return its part of a parameter of the calibrated model."""
        return self.state.model.get_parameter(name)[self.number]

    def solve(self, sums: dict[Group, GroupSums]) -> dict[str, dict[str, float]]:
        """Replace the matrices of a turn in the model, and return metrics of each."""
        new, metrics = solve(self.state, self.block, sums, self.current)
        refuse_overflow(self.block, new, self.state.rule.remedy)
        for name, value in new.items():
            self.current(name).copy_(value)
        return metrics

    def _of(self, model: LazyModel) -> TensorGetter:
        """Return what reads its part of a parameter of another model."""
        return lambda name: model.slot(name, self.number)

    def collect(self, turn: Sequence[Group]) -> dict[Group, GroupSums]:
        """Return sums over the tasks for matrices that are solved in one turn."""
        state, checks = self.state, Checks(self.block, compares_tasks=False)
        waiting = list[Callable[[], None]]()
        base = None if state.base is None else self._of(state.base)
        sums = {group: empty_sums(state, group, self.current, base) for group in turn}
        for task, rows in self.rows.items():
            for group in turn:
                task_sums = {group: self._sums_of(task, rows, group)}
                add_task(state, self.block, task, sums, task_sums, checks, waiting)
        for add in waiting:
            add()
        checks.run(state.processes.gather)
        return sums

    def _sums_of(self, task: str, rows: RoutedRows | None, group: Group) -> LinearTaskSums:
        """Return sums over a task's rows in front of a matrix."""
        state, site, mixture = self.state, group.sites[0], self.mixture
        expert, module = self._of(state.experts[task]), state.model.get_submodule(mixture.name)
        sums = LinearTaskSums(group, group.stack_weights(expert, state.dtype), state.rule)
        if rows is None:
            return sums
        with group.place(self.block, task):
            with state.streams.autocast():
                x, expert_x = mixture.input_of(site, module, self.current, rows.x), rows.expert_x
                if expert_x is not None:
                    expert_x = mixture.input_of(site, module, expert, expert_x)
            with exact_products():
                sums.add_rows(x, expert_x, rows.fitted_and_held_out, rows.weights)
        return sums


def calibrate_together(
    experts: Sequence[RoutedExpert], state: CalibrationState
) -> dict[tuple[int, str], Mapping[str, float]]:
    """Calibrate some routed experts, at most one per process, which solves it and sends the result.

    Returns:
        Number of the routed expert and name of the matrix -> metrics.
    """
    processes, metrics = state.processes, dict[tuple[int, str], Mapping[str, float]]()
    for turns in zip(*(expert.turns for expert in experts), strict=True):
        sums_to_solve = dict[Group, GroupSums]()
        for owner, (expert, turn) in enumerate(zip(experts, turns, strict=True)):
            sums = expert.collect(turn)
            tensors = (t for group_sums in sums.values() for t in group_sums.tensors())
            processes.reduce_sum(tensors, owner)
            if owner == processes.rank:
                sums_to_solve = sums
        solved = dict[tuple[int, str], Mapping[str, float]]()
        if sums_to_solve:
            expert = experts[processes.rank]
            for name, values in expert.solve(sums_to_solve).items():
                solved[expert.number, name] = values
        metrics |= processes.gather_dict(solved)
        for owner, (expert, turn) in enumerate(zip(experts, turns, strict=True)):
            for name in dict.fromkeys(name for group in turn for name in group.parameters):
                processes.broadcast(expert.current(name), owner)
    return metrics
