"""Checks of a turn's sums, with one transfer to the host for all of them."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import Tensor

from fusion_bench_featcal.core.finite import finiteness, read_back
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.errors.words import user_term
from fusion_bench_featcal.modules.sites import exclusion

DEAD_TASK_RATIO = 1e-6
"""Tasks with a smaller Gram norm, relative to the median task, would dominate the bias."""


class Checks:
    """Collects the sums of all tasks and groups of a turn, to check them together."""

    def __init__(self, block: str, *, compares_tasks: bool = True) -> None:
        """Start with no sums.

        Args:
            block: The block, for messages.
            compares_tasks: Whether a task's inputs may not be almost zero beside other tasks'.
        """
        self._block, self._compares_tasks = block, compares_tasks
        self._added: list[tuple[str, str, tuple[list[Tensor], ...]]] = []

    def add(self, task: str, module: str, sums_of_task: list[Any], sums: list[Tensor]) -> None:
        """Add a task's sums for a group, which a module names, and the sums over tasks so far."""
        tensors = [*sums, *(tensor for part in sums_of_task for tensor in part.tensors())]
        counts = [part.count for part in sums_of_task]
        compared = sums_of_task[:1] if self._compares_tasks else []
        norms = [part.gram_norm() for part in compared if isinstance(part, Moments)]
        self._added.append((task, module, (finiteness(tensors), counts, norms)))

    def run(self, gather: Callable[[Any], list[Any]]) -> None:
        """Check all sums.

        Args:
            gather: Returns the values of all processes.

        Raises:
            CalibrationError: If no position counts, sums are not finite, or a task's inputs are
                almost zero, naming task, block and module.
        """
        norms: dict[str, dict[str, float]] = defaultdict(dict)
        for task, module, broken, count, norm in chain(*gather(self._read())):
            with error_context(task=task, block=self._block, module=module):
                if count == 0:
                    raise CalibrationError(
                        "no position counts, because all are padding. Check the masks of its data, "
                        f"or exclude the module: {exclusion([module])}"
                    )
                if broken:
                    raise CalibrationError(
                        "inputs are NaN or infinite, or their sums overflow, while weights and "
                        "samples are finite: a forward pass overflows. Use float32: "
                        f"{user_term('float32')}. Or check the task's expert and data for extreme "
                        "values"
                    )
            norms[module][task] = norm
        for module, by_task in norms.items():
            median = statistics.median(by_task.values())
            for task, norm in by_task.items():
                if norm < DEAD_TASK_RATIO * median:
                    with error_context(task=task, block=self._block, module=module):
                        raise CalibrationError(
                            f"its inputs are almost zero (gram norm {norm:.1e}, median task "
                            f"{median:.1e}), so its weight would dominate the bias. Check its "
                            "expert and its calibration data, or remove the task"
                        )

    def _read(self) -> list[tuple[str, str, bool, float, float]]:
        """Return tasks and modules, if sums are not finite, number of rows, and Gram norm."""
        tensors = (tensor for *_, parts in self._added for part in parts for tensor in part)
        numbers, read = iter(read_back(list(tensors))), list[tuple[str, str, bool, float, float]]()
        for task, module, parts in self._added:
            signs, counts, norms = ([next(numbers) for _ in part] for part in parts)
            broken = not all(map(math.isfinite, signs))
            read.append((task, module, broken, sum(counts), norms[0] if norms else 1.0))
        return read
