"""Sums of FeatCal+ for a convolution with several groups, each a linear map of its own inputs."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.kfold import Change
from fusion_bench_featcal.engine.checks import DeferredCheck
from fusion_bench_featcal.engine.group_sums import Features, GroupSums, TaskRows
from fusion_bench_featcal.engine.module_groups import Group
from fusion_bench_featcal.engine.problem import Problem


class PartedSums:
    """`GroupSums` of every part of a module, and their solve.

    Attributes:
        group: The module.
        parts: Sums of its parts.
    """

    def __init__(self, problem: Problem, block: str, group: Group) -> None:
        """Start with no rows; arguments as for `GroupSums`."""
        self.group, self._block = group, block
        parts = [replace(group, part=number) for number in range(group.parts)]
        self.parts = [GroupSums(problem, block, part) for part in parts]

    @property
    def weight(self) -> Tensor:
        """Weight of a part, `[m, d]`."""
        return self.parts[0].weight

    @property
    def kfold(self) -> bool:
        """Return whether lambdas are chosen by held-out error."""
        return self.parts[0].kfold

    @property
    def checks(self) -> list[DeferredCheck]:
        """Checks that must pass before the sums are used."""
        return [check for part in self.parts for check in part.checks]

    def tensors(self) -> list[Tensor]:
        """The sums, to which those of other rows may be added in place."""
        return [tensor for part in self.parts for tensor in part.tensors()]

    def solve(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """As `GroupSums.solve`; the log record has the parts' largest residual and condition."""
        changes = [part.change()[0] for part in self.parts]
        change = Change(
            step=torch.cat([part.step for part in changes]),
            shift=torch.cat([part.shift for part in changes]),
            residual=max(part.residual for part in changes),
            condition=max(part.condition for part in changes),
        )
        record = {
            "module": self.group.first,
            "block": self._block,
            "residual": change.residual,
            "condition": change.condition,
            "writes": self.group.writes,
        }
        return self.parts[0].updated(change), [record]


class PartedRows:
    """`TaskRows` of every part of a module.

    Attributes:
        sums: The sums.
    """

    def __init__(self, sums: PartedSums, task: str, expert: nn.Module, weight: float) -> None:
        """Begin a task; arguments as for `TaskRows`."""
        self.sums = sums
        self._rows = [TaskRows(part, task, expert, weight) for part in sums.parts]

    def add(self, features: Features) -> None:
        """Add a batch's rows."""
        count = len(self._rows)
        for fold in range(len(features.rows.offsets)):
            for x, drift in features.pieces(self.sums.group, fold):
                shares = zip(x.chunk(count, -1), drift.chunk(count, -1), strict=True)
                for rows, (own, further) in zip(self._rows, shares, strict=True):
                    rows.put(fold, own, further)

    @property
    def has_cross(self) -> bool:
        """Return whether products of inputs and their drift are kept until the task's end."""
        return self._rows[0].has_cross

    def flush(self) -> None:
        """Add the rows that wait."""
        for rows in self._rows:
            rows.flush()

    def close(self) -> None:
        """End the task."""
        for rows in self._rows:
            rows.close()
