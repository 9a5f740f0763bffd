"""Checks of a turn's sums, with one transfer to the host for all of them."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.finite import not_finite, read_back
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.errors import CalibrationError

DEAD_TASK_RATIO = 1e-6
"""Tasks with a smaller Gram norm, relative to the median task, would dominate the bias."""


class Checks:
    """Collects the sums of all tasks and groups of a turn, to check them together."""

    def __init__(self, block: str) -> None:
        """Start with no sums."""
        self._block = block
        self._places: list[tuple[str, str]] = []
        self._numbers: list[Tensor] = []

    def add(self, task: str, module: str, sums_of_task: list[Any], sums: list[Tensor]) -> None:
        """Add a task's sums for a group, which a module names, and the sums over tasks so far."""
        self._places.append((task, module))
        tensors = [*sums, *(tensor for part in sums_of_task for tensor in part.tensors())]
        broken = torch.stack([not_finite(tensor) for tensor in tensors]).any()
        count = torch.stack([part.count for part in sums_of_task]).sum()
        norm = (
            sums_of_task[0].gram_norm()
            if isinstance(sums_of_task[0], Moments)
            else torch.ones_like(count)
        )
        self._numbers += [broken.to(norm), count.to(norm), norm]

    def run(self, gather: Callable[[Any], list[Any]]) -> None:
        """Check all sums.

        Args:
            gather: Returns the values of all processes.

        Raises:
            CalibrationError: If no position counts, sums are not finite, or a task's inputs are
                almost zero, naming task, block and module.
        """
        numbers = iter(read_back(self._numbers))
        figures = [(*key, *(next(numbers) for _ in range(3))) for key in self._places]
        norms: dict[str, dict[str, float]] = defaultdict(dict)
        for task, module, broken, count, norm in chain(*gather(figures)):
            place = f"task {task}, block {self._block}"
            if count == 0:
                raise CalibrationError(
                    f"{place}: no position counts in module {module}: all is padding. Check the "
                    "masks of its data, or exclude the module: "
                    f"modules=['!{module}']"
                )
            if broken:
                raise CalibrationError(
                    f"{place}, module {module}: inputs are NaN or infinite, or their sums "
                    "overflow, while weights and samples are finite: a forward pass overflows. "
                    "Compute in a wider precision (fabric.precision=32-true, or models in a wider "
                    "dtype), or check the task's expert and data for extreme values"
                )
            norms[module][task] = norm
        for module, by_task in norms.items():
            median = statistics.median(by_task.values())
            for task, norm in by_task.items():
                if norm < DEAD_TASK_RATIO * median:
                    raise CalibrationError(
                        f"task {task}, block {self._block}, module {module}: its inputs are "
                        f"almost zero (gram norm {norm:.1e}, median task {median:.1e}), so its "
                        f"weight would swamp the bias. Check its expert and its "
                        "calibration data, or drop the task"
                    )
