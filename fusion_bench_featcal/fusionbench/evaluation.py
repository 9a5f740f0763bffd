"""Evaluation of models on a FusionBench task pool, with per-example results."""

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
    by_task: Mapping[str, Mapping[str, Any]]  # task -> {metric: value}
    correct: dict[str, Any] | None  # task -> a flag for each test example, if the pool has flags

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
    """Open a task pool's data and read the first example of each task.

    FusionBench's own pools open their data in `setup`, together with their model. A pool without
    `setup` opens its data in each evaluation, and is not checked here.

    Raises:
        CalibrationError: If data cannot be opened, or have no examples.
        ValueError: If a task has no data.
    """
    if getattr(taskpool, "opened", None) is not None:
        return
    with error_context("taskpool", cause=unloadable):
        for task in task_names(taskpool) or ():
            examples = getattr(taskpool.test_dataloaders[task], "dataset", None)
            if isinstance(examples, Sized):  # a user's pool may have anything there
                if not len(examples):
                    raise CalibrationError(f"task {task!r} has no test examples")
                getitem(examples, 0)  # type: ignore[call-overload]  # raises if it cannot be read


def task_names(taskpool: BaseTaskPool) -> list[str] | None:
    """Set a pool up if it is not, and return its tasks, or None if it has no data loaders."""
    if not getattr(taskpool, "_is_setup", True):
        taskpool.setup()  # type: ignore[attr-defined]
        # Some of FusionBench's pools would open their data again in each evaluation.
        taskpool._is_setup = True  # type: ignore[attr-defined]
    return list(getattr(taskpool, "test_dataloaders", None) or ()) or None


def evaluate(
    taskpool: BaseTaskPool, model: nn.Module, tasks: Iterable[str] | None = None
) -> PoolEvaluation:
    """Evaluate one model on some tasks, by default on all tasks.

    A pool without data loaders by task evaluates all tasks.
    """
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


def join_evaluations(evaluations: Iterable[PoolEvaluation]) -> PoolEvaluation:
    """Join evaluations of different models, such as those of each expert on its task."""
    evaluations = list(evaluations)
    by_task = {task: values for joined in evaluations for task, values in joined.by_task.items()}
    correct = {t: flags for joined in evaluations for t, flags in (joined.correct or {}).items()}
    is_complete = all(joined.correct is not None for joined in evaluations)
    return PoolEvaluation(by_task, by_task, correct if is_complete else None)
