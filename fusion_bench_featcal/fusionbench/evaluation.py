"""Evaluation of models on a FusionBench task pool, including flags for every test item."""

from collections.abc import Iterable, Mapping, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Real
from operator import getitem
from typing import Any

import torch
from fusion_bench import BaseTaskPool
from torch import nn

from fusion_bench_featcal.core.kernels import choose_kernel, with_kernel
from fusion_bench_featcal.data.loading import unloadable
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.results import AVERAGE


@dataclass(frozen=True)
class PoolEvaluation:
    """Result of a task pool for one model."""

    raw: Mapping[str, Any]  # FusionBench's report
    by_task: Mapping[str, Mapping[str, Any]]  # task -> {accuracy, loss}, and more
    correct: dict[str, Any] | None  # a flag per test item, or None if the pool has none

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Metric -> task -> value, for every number in the pool's report."""
        scores: dict[str, dict[str, float]] = {}
        for task, values in self.by_task.items():
            for metric, value in values.items():
                if isinstance(value, Real) or getattr(value, "ndim", None) == 0:
                    scores.setdefault(metric, {})[task] = float(value)
        return scores


def open_tests(taskpool: Any) -> None:
    """Open a task pool's data up to the first rows. Its evaluations use what is opened here.

    FusionBench's own pools open their data in `setup`, together with their model. Those without
    `setup` open them in each evaluation, and are left.

    Raises:
        CalibrationError: If data cannot be opened, or have no rows.
        ValueError: If a task has no data.
    """
    if getattr(taskpool, "opened", None) is not None:
        return
    with error_context("taskpool", cause=unloadable):
        for task in task_names(taskpool) or ():
            rows = getattr(taskpool.test_dataloaders[task], "dataset", None)
            if isinstance(rows, Sized):  # a pool of a user's may have anything there
                if not len(rows):
                    raise CalibrationError(f"task {task!r} has no test items")
                getitem(rows, 0)  # type: ignore[call-overload]  # raises if it cannot be read


def task_names(taskpool: BaseTaskPool) -> list[str] | None:
    """Return the tasks of a pool, after its setup, or None if it has no loaders."""
    if not getattr(taskpool, "_is_setup", True):
        taskpool.setup()  # type: ignore[attr-defined]
        # Some of FusionBench's pools would open their data again in each evaluation.
        taskpool._is_setup = True  # type: ignore[attr-defined]
    return list(getattr(taskpool, "test_dataloaders", None) or ()) or None


def evaluate(
    taskpool: BaseTaskPool, model: nn.Module, tasks: Iterable[str] | None = None
) -> PoolEvaluation:
    """Evaluate one model on some tasks, by default on all. Some pools can only evaluate all."""
    loaders = getattr(taskpool, "test_dataloaders", None) if task_names(taskpool) else None
    requested = None if tasks is None else set(tasks)
    pool: Any = taskpool
    device = getattr(getattr(taskpool, "fabric", None), "device", torch.device("cpu"))
    kernel = with_kernel(choose_kernel(device), nullcontext)
    try:
        if loaders is not None and requested is not None:
            pool.test_dataloaders = {t: loader for t, loader in loaders.items() if t in requested}
        with kernel():
            raw = taskpool.evaluate(model)
    finally:
        if loaders is not None:
            pool.test_dataloaders = loaders
    by_task = {
        task: values
        for task, values in raw.items()
        if task not in (AVERAGE, "model_info")
        and isinstance(values, Mapping)
        and (requested is None or task in requested)
    }
    correct = getattr(taskpool, "item_correct", None)
    if correct is not None:
        correct = {t: correct[t] for t in by_task} if set(by_task) <= set(correct) else None
    return PoolEvaluation(raw, by_task, correct)


def joined_evaluation(evaluations: Iterable[PoolEvaluation]) -> PoolEvaluation:
    """Return one row from evaluations of different models, such as each expert on its task."""
    rows = list(evaluations)
    by_task = {task: values for row in rows for task, values in row.by_task.items()}
    correct = None
    if all(row.correct is not None for row in rows):
        correct = {task: flags for row in rows for task, flags in (row.correct or {}).items()}
    return PoolEvaluation(by_task, by_task, correct)
