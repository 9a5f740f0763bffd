"""Division of one calibration over processes: samples, sums, solves, parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusion_bench_featcal.processes import Processes

Value = TypeVar("Value")
Figures = dict[str, dict[str, Any]]
"""Figures of solves for the log, by module."""


class Team:
    """Processes, possibly one, each of which works on an equal share of all tasks' samples.

    The samples of all tasks, one task after another, are divided into one contiguous part for each
    process, by whole batches: process r of P works on the part from r / P to (r + 1) / P. A task
    may be split between neighbouring processes, and each process shares at most its first and its
    last task. The first process of a task leads it.

    Attributes:
        tasks: The tasks that this process works on.
        gather: Returns every process's value, by rank.
    """

    def __init__(self, processes: Processes, tasks: Sequence[str], device: torch.device) -> None:
        """Join the processes.

        Args:
            processes: The processes.
            tasks: All tasks.
            device: Device of this process's tensors.
        """
        self._processes, self._order, self._device = processes, list(tasks), device
        self._load = [0.0] * processes.size
        self.gather = processes.gather
        self.tasks = [task for task in tasks if processes.rank in self.members(task)]
        processes.prepare(map(self.members, tasks))

    def members(self, task: str) -> range:
        """Return the processes that work on a task. The first one leads it."""
        index, size, count = self._order.index(task), self._processes.size, len(self._order)
        return range(index * size // count, -(-(index + 1) * size // count))

    def cut(self, task: str, batches: Sequence[Any]) -> list[Any]:
        """Return the batches that begin in this process's part of all samples."""
        rank, size, count = self._processes.rank, self._processes.size, len(self._order)
        samples = sum(batch.samples for batch in batches)
        before = self._order.index(task) * samples

        def belongs(batch: Any) -> bool:
            return rank * count * samples <= (before + batch.start) * size < end

        end = (rank + 1) * count * samples
        return [batch for batch in batches if belongs(batch)]

    def whole(self, rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the sums of each task that this process leads, added up over its processes.

        A task's weight needs the Gram matrix of all its rows (Eq. 14). Split tasks come last, so
        that no process waits for another in between.

        Args:
            rows: This process's tasks with the sums for each module group.
        """
        split: list[tuple[str, Any]] = []
        for task, groups in rows:
            if len(self.members(task)) == 1:
                yield task, groups
            else:
                split.append((task, groups))
        self.gather(None)  # errors surface here, before a collective call
        for task, groups in split:
            members = self.members(task)
            for sums in groups.values():
                self._reduce(sums.tensors(), members[0], members)
            if members[0] == self._processes.rank:
                yield task, groups

    def _reduce(self, tensors: Sequence[Tensor], to: int, ranks: Sequence[int]) -> None:
        for tensor in tensors:
            self._processes.reduce(tensor, to, ranks)

    def add_up(self, sums: Mapping[Any, Value]) -> dict[Any, Value]:
        """Add up the sums of groups over all processes and return the groups this process solves.

        Each group goes to the process with the least work so far.
        """
        tensors = {group: group_sums.tensors() for group, group_sums in sums.items()}  # type: ignore[attr-defined]
        owners = self._deal({group: group.cost for group in sums})
        self.gather(None)  # errors surface here, before a collective call
        for group, owner in owners.items():
            self._reduce(tensors[group], owner, range(self._processes.size))
        return {group: sums[group] for group in sums if owners[group] == self._processes.rank}

    def _deal(self, costs: Mapping[Any, float]) -> dict[Any, int]:
        """Assign work, most expensive first. The result is equal in all processes."""
        owners: dict[Any, int] = {}
        for group in sorted(costs, key=lambda group: -costs[group]):
            owners[group] = self._load.index(min(self._load))
            self._load[owners[group]] += costs[group]
        return owners

    def spread(
        self, updates: Mapping[str, Tensor], figures: Figures
    ) -> tuple[dict[str, Tensor], Figures]:
        """Give every process the parameters and figures of all others."""
        shapes = {name: (value.shape, value.dtype) for name, value in updates.items()}
        gathered = self.gather((shapes, figures))
        received = [
            {name: value.contiguous() for name, value in updates.items()}
            if rank == self._processes.rank
            else {n: torch.empty(s, dtype=d, device=self._device) for n, (s, d) in shapes.items()}
            for rank, (shapes, _) in enumerate(gathered)
        ]
        self.gather(None)  # errors surface here, before a collective call
        for rank, tensors in enumerate(received):
            for tensor in tensors.values():
                self._processes.broadcast(tensor, rank)
        return (
            {name: tensor for tensors in received for name, tensor in tensors.items()},
            {module: figure for _, solved in gathered for module, figure in solved.items()},
        )

    def of_first(self, find: Callable[[], Value]) -> Value:
        """Call a function in the first process and return its result in all processes."""
        return self.gather(find() if self._processes.rank == 0 else None)[0]  # type: ignore[return-value]
