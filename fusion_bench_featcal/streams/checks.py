"""Checks of a turn's sums, with one transfer to the host for all of them."""

import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.finite import not_finite, read_back
from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

DEAD_TASK_RATIO = 1e-6
"""Tasks with a smaller Gram norm, relative to the median task, would dominate the bias."""


def sums_dtype(rule: Rule, precision: str, tasks: int, device: torch.device) -> torch.dtype:
    """Return the least precise dtype of sums over rows, following `sums_precision`.

    Warns if the rule needs a wider dtype than the setting gives.
    """
    needed = rule.dtype(tasks, torch.device("cpu"))
    dtype = solve_dtype(device) if precision == "float64" else torch.float32
    if precision == "auto":
        dtype = rule.dtype(tasks, device)
    if needed == torch.float64 != dtype:
        chosen = f"method.sums_precision={precision}"
        log.warning(
            "%s is too coarse for method.ridge_lambda: rounding of the sums moves the update by "
            "about 1 %% (float32) or up to 24 %% (bfloat16). Set method.sums_precision=auto on a "
            "CPU or CUDA device, or raise method.ridge_lambda to 0.01",
            f"{device.type}, which has no float64," if precision == "auto" else chosen,
        )
    return dtype


class Checks:
    """Collects the sums of all tasks and groups of a turn, to check them together."""

    def __init__(self, block: str) -> None:
        """Start with no sums."""
        self._block = block
        self._places: list[tuple[str, str]] = []
        self._numbers: list[Tensor] = []

    def add(self, task: str, group: Group, rows: Any, figures: Mapping[str, Tensor]) -> None:
        """Add a task's sums for one group.

        Args:
            task: The task.
            group: The group.
            rows: Its `LinearRows` or `AffineRows`.
            figures: The return value of `GroupSums.add`.
        """
        self._places.append((task, group.name))
        looked_at = (*rows.tensors(), *figures.values())
        broken = torch.stack([not_finite(sums) for sums in looked_at]).any()
        norm = figures.get("norm", torch.ones_like(rows.count))
        self._numbers += [broken.to(norm), rows.count.to(norm), norm]

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
            error_prefix = f"task {task}, block {self._block}"
            if count == 0:
                raise CalibrationError(
                    f"{error_prefix}: no position counts in module {module}: all is padding, or "
                    "the module never runs. Check the masks of its data "
                    f"(modelpool.train_datasets.{task}), or exclude the module: "
                    f"method.modules=['!{module}']"
                )
            if broken:
                raise CalibrationError(
                    f"{error_prefix}, module {module}: inputs are NaN or infinite, or their sums "
                    "overflow, while weights and samples are finite: a forward pass overflows. "
                    "Compute in a wider precision (fabric.precision=32-true, or wider "
                    f"modelpool.models), or check modelpool.models.{task} and "
                    f"modelpool.train_datasets.{task} for extreme values"
                )
            norms[module][task] = norm
        for module, by_task in norms.items():
            median = statistics.median(by_task.values())
            for task, norm in by_task.items():
                if norm < DEAD_TASK_RATIO * median:
                    raise CalibrationError(
                        f"task {task}, block {self._block}, module {module}: its inputs are "
                        f"almost zero (gram norm {norm:.1e}, median task {median:.1e}), so its "
                        f"weight would swamp the bias. Check modelpool.models.{task} and its "
                        "calibration data, or drop the task"
                    )
