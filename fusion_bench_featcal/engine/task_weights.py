"""Weights of the tasks for modules that are solved together, by what their experts give."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.cholesky import solve_dtype
from fusion_bench_featcal.core.finite import read_back
from fusion_bench_featcal.engine.block import DEAD_TASK_RATIO
from fusion_bench_featcal.engine.module_groups import Group
from fusion_bench_featcal.engine.recording import Recording
from fusion_bench_featcal.engine.rows import CountedRows, rows_of
from fusion_bench_featcal.engine.task_sums import not_finite_features
from fusion_bench_featcal.engine.team import Alone, Solved, Team
from fusion_bench_featcal.settings import CalibrationError

Squares = dict[int, list[Tensor]]
"""By group: the sum of squares of the modules' outputs, and how much their rows weigh."""

Weights = Mapping[str, Mapping[int, float]]
"""By task and group."""


def square_of(output: Tensor, mask: CountedRows | None) -> Tensor:
    """Sum of squares over the rows that count, weighted."""
    norms = torch.linalg.vector_norm(rows_of(output, mask), dim=1)
    squares = norms.to(solve_dtype(output.device)).square()
    weighted = squares if mask is None or mask.weights is None else squares * mask.weights
    return weighted.sum()


def weight_of(x: Tensor, mask: CountedRows | None) -> Tensor:
    """Sum of the weights of the rows that count."""
    if mask is not None and mask.weights is not None:
        return mask.weights.sum()
    count = x.numel() // x.shape[-1] if mask is None else mask.count
    return torch.as_tensor(float(count), device=x.device)


@dataclass
class OneTaskSquares:
    """Squares of one task's outputs."""

    task: str
    sums: Squares = field(default_factory=dict)

    def add(self, model: nn.Module, cal: Recording, exp: Squares, *rows: Any) -> None:
        """Add a batch's."""
        for number, new in exp.items():
            old = self.sums.get(number, [torch.zeros_like(part) for part in new])
            self.sums[number] = [a + b for a, b in zip(old, new, strict=True)]


class TaskSquares:
    """Squares of every task's outputs, from which the tasks' weights follow."""

    def __init__(
        self,
        block: str,
        groups: Sequence[Group],
        team: Alone | Team,
        adopt: Callable[[Weights], None],
    ) -> None:
        """Start with no task.

        Args:
            block: The block.
            groups: Its groups of modules.
            team: The processes that share the work.
            adopt: Takes over the weights.
        """
        self._block, self._groups, self._team, self._adopt = block, groups, team, adopt
        self._sums: dict[str, dict[int, list[float]]] = {}

    def add(self, sums: OneTaskSquares, expert: nn.Module) -> None:
        """Add one task's."""
        values = read_back([part for pair in sums.sums.values() for part in pair])
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        self._sums[sums.task] = dict(zip(sums.sums, pairs, strict=True))

    def solve(self) -> Solved:
        """Weigh the tasks; no parameter changes."""
        total: dict[str, dict[int, list[float]]] = {}
        for part in self._team.gather(self._sums):
            for task, groups in part.items():
                for number, new in groups.items():
                    old = total.setdefault(task, {}).get(number, [0.0, 0.0])
                    total[task][number] = [a + b for a, b in zip(old, new, strict=True)]
        for number, group in enumerate(self._groups):
            self._refuse_dead_tasks(group, {task: groups[number] for task, groups in total.items()})
        self._adopt(
            {
                task: {n: 1 / (square or weight) for n, (square, weight) in groups.items()}
                for task, groups in total.items()
            }
        )
        return {}, []

    def _refuse_dead_tasks(self, group: Group, squares: Mapping[str, Sequence[float]]) -> None:
        for task, (square, weight) in squares.items():
            place = f"task {task}, block {self._block}, module {group.first}"
            if weight == 0:
                raise CalibrationError(
                    f"{place}: no sample of the task reaches it. Exclude it: "
                    f"method.modules=['!{group.first}']"
                )
            if not math.isfinite(square):
                raise not_finite_features(place, task)
        means = {task: square / weight for task, (square, weight) in squares.items()}
        median = statistics.median(means.values())
        for task, mean in means.items():
            if mean < DEAD_TASK_RATIO * median:
                raise CalibrationError(
                    f"task {task}, block {self._block}, module {group.first}: what its expert "
                    f"gives is almost zero (mean square {mean:.1e}, median task {median:.1e}), so "
                    f"its weight would swamp the others'. Check modelpool.models.{task} and its "
                    "calibration data, or drop the task"
                )
