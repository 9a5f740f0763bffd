"""Warnings of what a pool hardly means: tasks without an expert, the same weights twice."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

from fusion_bench.modelpool import BaseModelPool
from omegaconf import DictConfig
from torch import nn

from fusion_bench_featcal.boundary.checkpoints import adapter_paths, checkpoint_path
from fusion_bench_featcal.experts import ExpertSource, InMemoryExpert
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert

log = logging.getLogger(__name__)

BASE_MODEL = "_pretrained_"
_TENSORS = 16  # of each model, for a first comparison
_VALUES = 32  # of each tensor, from its middle
_warned: WeakSet[Any] = WeakSet()


def warn_about_pool(modelpool: BaseModelPool) -> None:
    """Warn once a pool of tasks that no expert has, and of models with the same weights.

    Args:
        modelpool: The pool; its program's task pool is looked at besides.
    """
    if modelpool in _warned:
        return
    _warned.add(modelpool)
    _warn_of_tasks(modelpool)
    _warn_of_twins(modelpool)


def _warn_of_tasks(modelpool: BaseModelPool) -> None:
    taskpool = getattr(getattr(modelpool, "_program", None), "taskpool", None)
    named = {
        "modelpool": _names(modelpool, ("_train_datasets", "_val_datasets", "_test_datasets")),
        "taskpool": _names(taskpool, ("_test_datasets", "_tasks", "tasks")),
    }
    for place, tasks in named.items():
        without = sorted(tasks - set(modelpool.model_names))
        if without:
            log.warning(
                "%s has data of tasks that no expert of modelpool.models has: %s",
                place,
                ", ".join(without),
            )


def _names(pool: Any, keys: Iterable[str]) -> set[str]:
    parts = (getattr(pool, key, None) for key in keys)
    return {str(name) for part in parts if isinstance(part, Mapping | DictConfig) for name in part}


def _warn_of_twins(modelpool: BaseModelPool) -> None:
    sources = {name: _source(modelpool, name) for name in modelpool.model_names}
    base = _source(modelpool, BASE_MODEL) if modelpool.has_pretrained else None
    seen: list[str] = []
    for name, source in sources.items():
        twin = next((other for other in seen if _same(source, sources[other])), None)
        if twin is not None:
            log.warning("experts %r and %r have the same weights", twin, name)
        elif base is not None and _same(source, base):
            log.warning(
                "expert %r has the base model's weights: there is nothing to learn from it", name
            )
        seen.append(name)


def _source(modelpool: BaseModelPool, name: str) -> ExpertSource | tuple[Any, ...] | None:
    """A model's weights where a glimpse of them is cheap; a LoRA expert's folders."""
    entry: Any = modelpool._models[name]
    if isinstance(entry, nn.Module):
        return InMemoryExpert(entry)
    adapter = adapter_paths(modelpool, name)
    if adapter is not None:
        return adapter
    path = checkpoint_path(modelpool, name)
    try:
        return None if path is None else SafetensorsExpert(path)
    except FileNotFoundError:  # files of another kind
        return None


def _same(one: Any, other: Any) -> bool:
    """Tell whether two models seem to hold the same values under the names that both have."""
    if one is None or isinstance(one, tuple) or isinstance(other, tuple) or other is None:
        return one is not None and one == other
    names = sorted(one.names() & other.names())
    few = names[:: max(1, len(names) // _TENSORS)]
    # A few tensors tell most pairs apart; fine-tuning may have left just those as they were.
    return bool(names) and all(_glimpse(one, n) == _glimpse(other, n) for n in (*few, *names))


def _glimpse(source: ExpertSource, name: str) -> tuple[Any, ...]:
    values = source.tensor(name).detach().reshape(-1)
    start = max(0, len(values) - _VALUES) // 2
    return source.shape(name), str(values.dtype), values[start : start + _VALUES].tolist()
