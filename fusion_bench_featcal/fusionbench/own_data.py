"""`method.calibration_data`: a run's calibration data in place of a pool's datasets."""

import copy
from collections.abc import Mapping
from typing import Any

from fusion_bench.modelpool import BaseModelPool
from omegaconf import OmegaConf

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint
from fusion_bench_featcal.settings import FeatCalSettings

_TASKS = "_featcal_own_data"  # attribute of a pool: tasks with data from `method.calibration_data`


def with_own_data(modelpool: BaseModelPool, settings: FeatCalSettings) -> BaseModelPool:
    """Return a copy of the pool with `calibration_data` in its datasets of `calibration_split`.

    Raises:
        CalibrationError: If a task has no expert in the pool, with the nearest task that has one.
    """
    entries = settings.calibration_data or {}
    if not entries:
        return modelpool
    for task in entries:
        if task not in modelpool.model_names:
            raise CalibrationError(
                f"method.calibration_data.{task}: modelpool.models has no expert {task!r}"
                f"{nearest_hint(task, modelpool.model_names)}; it has "
                f"{', '.join(modelpool.model_names)}"
            )
    pool: Any = copy.copy(modelpool)
    name = f"_{settings.calibration_split}_datasets"
    data_sets = {**(getattr(modelpool, name, None) or {})}
    for task, entry in entries.items():
        is_config = isinstance(entry, Mapping)
        data_sets[task] = OmegaConf.create(dict(entry)) if is_config else entry
    setattr(pool, name, data_sets)
    setattr(pool, _TASKS, frozenset(entries))
    return pool


def data_setting(modelpool: Any, task: str, split: str) -> str:
    """Return the setting that names a task's dataset of a split, for messages."""
    if task in getattr(modelpool, _TASKS, ()):
        return f"method.calibration_data.{task}"
    return f"modelpool.{split}_datasets.{task}"
