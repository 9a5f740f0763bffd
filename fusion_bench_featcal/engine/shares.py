"""Shares of the work: tasks, or batches of a task, dealt out to processes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

Part = TypeVar("Part")
_NOTHING: Any = object()


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

    def cut(self, task: str, batches: Iterable[Part]) -> Iterator[Part]:
        """Yield the batches of a task that this process works on; all are looked at."""
        members = self.members(task)
        for index, batch in enumerate(batches):
            if members[index % len(members)] == self.rank:
                yield batch

    def collected(self, told: Sequence[Mapping[str, Part]]) -> dict[str, list[Part]]:
        """Collect what every process gathered about its tasks, by task; a task's leader first.

        Args:
            told: Each process's word on each of its tasks.
        """
        return {task: [told[rank][task] for rank in self.members(task)] for task in self.tasks}


def interleaved(parts: Sequence[Sequence[Part]]) -> list[Part]:
    """Merge lists with an entry a batch, one from every process's share, in the batches' order."""
    rounds = zip_longest(*parts, fillvalue=_NOTHING)
    return [entry for turn in rounds for entry in turn if entry is not _NOTHING]
