"""Processes that share the work of one block loop: their sums are added up, each solves a part."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fusion_bench_featcal.engine.block import BlockSums, Names, Tallies, refuse_other_groups
from fusion_bench_featcal.engine.processes import Processes, check_agreement
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.settings import FeatCalSettings

Value = TypeVar("Value")
Solved = tuple[dict[str, Tensor], list[dict[str, Any]]]
"""New parameters of a block by name, and a log record for each linear module."""


@dataclass(frozen=True)
class Shares:
    """Tasks, or batches of one, that each process works on.

    Tasks are dealt out in turn, task i to process i modulo their number. Every task has
    `samples_per_task` samples at most, so that is also the balance of samples. Where there are more
    processes than tasks, the further ones are dealt out in turn too: a task's first process leads
    it, and batch j goes to process j modulo the task's number of processes.

    Attributes:
        tasks: All tasks in order.
        rank: This process.
        size: Number of processes.
    """

    tasks: tuple[str, ...]
    rank: int = 0
    size: int = 1

    @property
    def mine(self) -> tuple[str, ...]:
        """The tasks that this process works on, in order."""
        return tuple(task for task in self.tasks if self.rank in self.members(task))

    @property
    def leaders(self) -> tuple[int, ...]:
        """The processes that lead a task."""
        return tuple(range(min(self.size, len(self.tasks))))

    @property
    def leads(self) -> bool:
        """Return whether this process leads the tasks it works on."""
        return self.rank in self.leaders

    @property
    def divided(self) -> bool:
        """Return whether a task has several processes; each process has one task then."""
        return self.size > len(self.tasks)

    def members(self, task: str) -> tuple[int, ...]:
        """The processes that work on a task; the first leads it."""
        index = self.tasks.index(task)
        if not self.divided:
            return (index % self.size,)
        return tuple(range(index, self.size, len(self.tasks)))

    def groups(self) -> list[tuple[int, ...]]:
        """All groups of processes that add up tensors."""
        return [self.leaders, *(self.members(task) for task in self.tasks)]

    def cut(self, task: str, batches: Iterable[Value]) -> Iterator[Value]:
        """Yield the batches of a task that this process works on; all are looked at."""
        members = self.members(task)
        for index, batch in enumerate(batches):
            if members[index % len(members)] == self.rank:
                yield batch

    def collected(self, gathered: Sequence[Mapping[str, Value]]) -> dict[str, list[Value]]:
        """Collect what every process gathered about its tasks, by task; a task's leader first.

        Args:
            gathered: Each process's word on each of its tasks.
        """
        return {task: [gathered[rank][task] for rank in self.members(task)] for task in self.tasks}


class Solvable(Protocol):
    """Sums of a turn over tasks."""

    def add(self, sums: Any, expert: nn.Module) -> None:
        """Fold one task in, given its expert with the block's parameters."""
        ...

    def solve(self) -> Solved:
        """Solve every module."""
        ...


class Alone:
    """One process, which does everything."""

    def cut(self, task: str, batches: Iterable[Value]) -> Iterable[Value]:
        """The batches of a task that this process works on: all."""
        return batches

    def combine(self, sums: Any, device: torch.device) -> bool:
        """Add up a task's sums over its processes; return whether this one folds them."""
        return True

    def owners(self, costs: Sequence[float]) -> list[int]:
        """Deal out work of these costs; return the process of each piece."""
        return [0] * len(costs)

    def add_up(self, tensors: Iterable[Tensor], owner: int = 0) -> bool:
        """Add up tensors over all processes in one; return whether it is this one."""
        return True

    def spread(self, updates: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
        """Give every process the new parameters that one of them has found."""
        return updates

    def solve(self, sums: Solvable, model: nn.Module) -> Solved:
        """Solve a block."""
        return sums.solve()

    def gather(self, value: Value) -> list[Value]:
        """Every process's value."""
        return [value]

    def collected(self, values: Sequence[Mapping[str, Value]]) -> dict[str, list[Value]]:
        """Collect what every process gathered about its tasks, by task; a task's leader first."""
        return {task: [value] for task, value in values[0].items()}


class Team:
    """Several processes, each of which works on its share of the tasks or of a task's batches.

    Modules that share an input are added up in one process, which solves them and gives the others
    their parameters: all processes hold the same bits, whatever machines they run on.
    """

    def __init__(self, processes: Processes, shares: Shares) -> None:
        """Join.

        Args:
            processes: The processes.
            shares: The work of each.
        """
        self._processes = processes
        self._shares = shares
        self.cut = shares.cut
        self.gather = processes.gather
        self.collected = shares.collected

    def combine(self, sums: Any, device: torch.device) -> bool:
        """Add up the sums of a task that several processes share, in the one that leads it.

        Its weight needs the whole gram, so this comes before it is folded into the block's sums.

        Args:
            sums: This process's sums; afterwards the whole task's, in the leader.
            device: Where sums are kept.

        Returns:
            Whether this process leads the task, and so folds it.

        Raises:
            CalibrationError: If the processes summed up different things.
        """
        if not self._shares.divided or not isinstance(sums, TaskSums):
            return True  # other sums are added up over all tasks and processes at once
        members = self._shares.members(sums.task)
        # A process without batches of the task has no sums, and adds zeros.
        tensors = sums.tensors()
        layout = list(sums.linear), [(tuple(t.shape), t.dtype) for t in tensors]
        layouts = self._processes.gather(layout)
        wanted = layouts[members[0]]
        for rank in members:
            if layouts[rank][1] and layouts[rank] != wanted:
                raise sums.error(
                    f"modules share their inputs in other ways in process {rank} than in process "
                    f"{members[0]}, so that the task cannot be divided. Lower fabric.devices to at "
                    "most the number of tasks"
                )
        for tensor in tensors or [torch.zeros(s, dtype=d, device=device) for s, d in wanted[1]]:
            self._processes.reduce(tensor, members[0], members)
        return self._shares.leads

    def solve(self, sums: Solvable, model: nn.Module) -> Solved:
        """Solve a block from the sums of all processes.

        Args:
            sums: This process's sums; empty if it leads no task.
            model: The calibrated model.

        Returns:
            As `BlockSums.solve`, the same in every process.

        Raises:
            CalibrationError: As `BlockSums.solve`.
        """
        if not isinstance(sums, BlockSums):
            return sums.solve()
        gathered = self._processes.gather(sums.tallies() if self._shares.leads else {})
        tallies = {t: gathered[self._shares.members(t)[0]][t] for t in self._shares.tasks}
        groups = list(next(iter(tallies.values())))
        for task in tallies:
            refuse_other_groups(f"task {task}, block {sums.block}", tallies[task], groups)
        updates: dict[str, Tensor] = {}
        records: list[dict[str, Any]] = []
        tensors = {n: sums.linear[n].tensors() for n in groups} if self._shares.leads else {}
        self._processes.gather(None)  # what may fail comes before: all must be there to add up
        if self._shares.leads:
            self._bring_together(sums, tensors, tallies)
            updates, records = sums.solve(tallies)
        solved = self._processes.gather((list(updates), records))
        order = [name for names in groups for name in names]
        records = [record for _, others in solved for record in others]
        records.sort(key=lambda record: order.index(record["module"]))
        return self._spread(updates, [names for names, _ in solved], model), records

    def _bring_together(
        self, sums: BlockSums, tensors: Mapping[Names, Sequence[Tensor]], tallies: Tallies
    ) -> None:
        """Add up all sums, each in the process that will solve with it; the others let it go."""
        costs = [sums.cost(names) for names in tensors] + [0.0] * len(sums.norm)
        owners = iter(spread_costs(costs, self._shares.leaders))
        for names in list(tensors):
            if self._reduced(tensors[names], next(owners)):
                weights = {task: groups[names][0] for task, groups in tallies.items()}
                sums.linear[names].adopt(weights)
            else:
                del sums.linear[names]
        for name in list(sums.norm):
            if self._reduced(sums.norm[name].tensors(), next(owners)):
                sums.norm[name].tasks = len(tallies)
            else:
                del sums.norm[name]

    def owners(self, costs: Sequence[float]) -> list[int]:
        """Deal out work of these costs; return the process of each piece."""
        return spread_costs(costs, range(self._processes.size))

    def add_up(self, tensors: Iterable[Tensor], owner: int = 0) -> bool:
        """Add up tensors, of the same shapes in all processes, in one; tell whether it is this."""
        self.gather(None)  # what may fail comes before: all must be there to add up
        for tensor in tensors:
            self._processes.reduce(tensor, owner, range(self._processes.size))
        return self._processes.rank == owner

    def spread(self, updates: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
        """Spread what one process has found; the others give nothing."""
        return self._spread(updates, self.gather(list(updates)), model)

    def _reduced(self, tensors: Sequence[Tensor], owner: int) -> bool:
        """Add up tensors in one process; return whether it is this one."""
        for tensor in tensors:
            self._processes.reduce(tensor, owner, self._shares.leaders)
        return owner == self._processes.rank

    def _spread(
        self, updates: Mapping[str, Tensor], solved: Sequence[Sequence[str]], model: nn.Module
    ) -> dict[str, Tensor]:
        """Give every process all new parameters, in the model's dtype."""
        owners = {name: rank for rank, names in enumerate(solved) for name in names}
        tensors = model.state_dict()  # statistics are no parameters
        everything = {name: torch.empty_like(tensors[name]) for name in owners}
        for name, value in updates.items():
            everything[name].copy_(value)
        self._processes.gather(None)  # as above
        for name, rank in owners.items():
            self._processes.broadcast(everything[name], rank)
        return everything


def team_of(
    processes: Processes,
    shares: Shares,
    settings: FeatCalSettings,
    merged: nn.Module,
    family: Family,
) -> Alone | Team:
    """Make a team of processes, which must have been started alike and all make theirs.

    Args:
        processes: The processes.
        shares: The work of each.
        settings: Settings of the calibration.
        merged: The merged model.
        family: How it is cut into blocks.

    Raises:
        CalibrationError: If they were started differently, naming the difference.
    """
    if processes.size == 1:
        return Alone()
    from fusion_bench_featcal.checkpoints.dependencies import describe_settings
    from fusion_bench_featcal.digests import glimpse

    check_agreement(
        processes,
        settings=describe_settings(settings),
        tasks=shares.tasks,
        blocks=family.stages(merged),
        weights=lambda: glimpse(merged),
    )
    processes.prepare(shares.groups())
    return Team(processes, shares)


def spread_costs(costs: Sequence[float], ranks: Sequence[int]) -> list[int]:
    """Deal out work, dearest first, each piece to the process that has the least.

    Args:
        costs: Cost of each piece.
        ranks: The processes.

    Returns:
        The process of each piece.
    """
    load = dict.fromkeys(ranks, 0.0)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[index] = min(load, key=lambda rank: (load[rank], rank))
        load[owners[index]] += costs[index]
    return owners
