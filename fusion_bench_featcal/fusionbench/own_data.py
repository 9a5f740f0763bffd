"""`method.calibration_data`: calibration data that a run brings for a pool's tasks."""

import copy
from collections.abc import Mapping
from typing import Any

from fusion_bench.modelpool import BaseModelPool
from omegaconf import OmegaConf

from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

_OWN = "_featcal_own_data"  # set on a pool by `with_own_data`: its tasks


def with_own_data(modelpool: BaseModelPool, settings: FeatCalSettings) -> BaseModelPool:
    """Return the pool as it would be if `calibration_data` stood in its data sets.

    The entries take the place of the pool's own in the data sets of `calibration_split`.

    Args:
        modelpool: The pool. It is not changed.
        settings: `calibration_data` and `calibration_split` are used.

    Raises:
        CalibrationError: If a task has no expert in the pool, with the nearest that has.
    """
    own = settings.calibration_data or {}
    if not own:
        return modelpool
    for task in own:
        if task not in modelpool.model_names:
            raise CalibrationError(
                f"method.calibration_data.{task}: modelpool.models has no expert {task!r}"
                f"{nearest_hint(task, modelpool.model_names)}; it has "
                f"{', '.join(modelpool.model_names)}"
            )
    pool: Any = copy.copy(modelpool)
    name = f"_{settings.calibration_split}_datasets"
    entries = {**(getattr(modelpool, name, None) or {})}
    entries |= {task: _config(entry) for task, entry in own.items()}
    setattr(pool, name, entries)
    setattr(pool, _OWN, frozenset(own))
    return pool


def _config(entry: Any) -> Any:
    return OmegaConf.create(dict(entry)) if isinstance(entry, Mapping) else entry


def data_setting(modelpool: Any, task: str, split: str) -> str:
    """Return the setting that names a task's data set of a split, for messages."""
    if task in getattr(modelpool, _OWN, ()):
        return f"method.calibration_data.{task}"
    return f"modelpool.{split}_datasets.{task}"


def named_entry(modelpool: Any, name: str) -> Any:
    """Return what a pool's config has under a name that the pool's class does not take.

    FusionBench passes over such keys with a warning: `processor` of its image classifiers.
    """
    config = getattr(getattr(modelpool, "_program", None), "_modelpool", None)
    return config.get(name) if isinstance(config, Mapping) else None
