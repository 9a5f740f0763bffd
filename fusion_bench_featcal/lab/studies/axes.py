"""Axes of a study: names and values from YAML, and what each value changes in the config."""

import itertools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.lab.studies.axis import Axis, Changes, Option, unresolved
from fusion_bench_featcal.lab.studies.data_axes import corruption_axis, source_axis
from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results import FEATCAL
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)

# Settings that all methods of a comparison share; other settings are FeatCal's.
_SHARED = ("samples_per_task", "calibration_split", "steps")


def make_axis(name: str, values: Any, config: DictConfig) -> Axis:
    """The axis of an entry of `method.axes`.

    Args:
        name: A key of `AXES`, a setting of the comparison or of FeatCal, or any name for changes.
        values: A list of values; or label -> changes (dotted key -> value).
        config: The program's config.

    Raises:
        ValueError: If the name is unknown, or a value does not fit.
    """
    values, place = plain(values), f"method.axes.{name}"
    if not isinstance(values, Mapping | list) or not values:
        raise ValueError(
            f"{place} must be a list of values, or labels with their changes, got {values!r}"
        )
    if name in AXES:
        return AXES[name](name, values, config)
    if isinstance(values, Mapping):
        return _labelled(name, values)
    if name == "seed":
        raise ValueError(f"{place}: every point is run with each seed of method.seeds={values}")
    known = (*AXES, *_SHARED, *FeatCalSettings.names())
    if name not in known:
        raise ValueError(
            f"{place} is no axis{nearest_hint(name, known)}; there are {', '.join(AXES)}, the "
            f"comparison's {', '.join(_SHARED)}, the settings of FeatCal, and any name with labels "
            "and their changes"
        )
    return _setting(name, values, config)


def _setting(name: str, values: Sequence[Any], config: DictConfig) -> Axis:
    for value in values:
        if isinstance(value, list | dict):
            raise ValueError(
                f"method.axes.{name}: {value!r} needs a label, as in method.axes.{name}={{mine: "
                f"{{method.post_merging_methods.{FEATCAL}.{name}: {value}}}}}"
            )
    for value in values if name in _SHARED else ():  # the grid checks FeatCal's own
        try:
            FeatCalSettings(**({"batch_size" if name == "steps" else name: value}))
        except ValueError as error:
            reason = str(error).replace("method.batch_size", "method.steps")
            raise ValueError(f"method.axes.{name}: {reason}") from None
    if name in _SHARED:
        key, default = f"method.{name}", None
    else:
        place, default = f"post_merging_methods.{FEATCAL}", getattr(FeatCalSettings, name)
        # A pool's own changes of a method come after the method's.
        of_pool = OmegaConf.select(config, f"modelpool.featcal.compare.{place}")
        fixed = isinstance(of_pool, DictConfig) and name in of_pool
        place = f"modelpool.featcal.compare.{place}" if fixed else f"method.{place}"
        key = f"{place}.{name}"
    present = OmegaConf.select(config, key, default=default)
    options = [Option({name: value}, {key: value}) for value in dict.fromkeys(values)]
    return Axis(name, options, Option({name: present}, {}))


def _labelled(name: str, values: Mapping[str, Any]) -> Axis:
    """An axis of named changes; the first one is its centre."""
    for label, changes in values.items():
        if not isinstance(changes, Mapping):
            raise ValueError(
                f"method.axes.{name}.{label} must map dotted keys of the config to values, got "
                f"{changes!r}"
            )
    options = [Option({name: str(label)}, dict(changes)) for label, changes in values.items()]
    return Axis(name, options, options[0])


def _task_subsets(name: str, values: Any, config: DictConfig) -> Axis:
    """Numbers of tasks; each is a point for every subset, or for `method.subsets` drawn ones."""
    tasks = [str(task) for task in config.modelpool.get("models", {}) if not task.startswith("_")]
    most = config.method.get("subsets")
    if len(tasks) < 2:
        raise ValueError(
            f"method.axes.{name} needs a model pool with two experts or more, this one has "
            f"{', '.join(tasks) or 'none'}"
        )
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ValueError(f"method.subsets must be null (all) or an integer >= 1, got {most!r}")
    options = []
    for number in values:
        if isinstance(number, bool) or not isinstance(number, int) or number < 2:
            raise ValueError(f"method.axes.{name} must be integers >= 2, got {number!r}")
        if number > len(tasks):
            log.info("the pool has %s: none are merged by %d", counted(len(tasks), "task"), number)
        for subset in _subsets(tasks, number, most):
            labels = {name: number, "subset": "+".join(subset)}
            options.append(Option(labels, _keep_tasks(config, subset)))
    if not options:
        raise ValueError(f"method.axes.{name}={values}: the pool has {counted(len(tasks), 'task')}")
    return Axis(name, options)


def _subsets(tasks: Sequence[str], number: int, most: int | None) -> list[tuple[str, ...]]:
    """All subsets of a size, or a sample of them that depends on nothing but the tasks."""
    every = list(itertools.combinations(tasks, number))
    if most is None or len(every) <= most:
        return every
    chosen = random.Random(",".join([*tasks, str(number)])).sample(range(len(every)), most)
    return [every[place] for place in sorted(chosen)]


def _keep_tasks(config: DictConfig, tasks: Sequence[str]) -> Changes:
    """Changes that leave some tasks in the model pool and the task pool."""
    changes = {}
    for pool in ("modelpool", "taskpool"):
        for key, entries in (config.get(pool) or {}).items():
            if key != "models" and not str(key).endswith("_datasets") and key != "tasks":
                continue
            if isinstance(entries, ListConfig):
                changes[f"{pool}.{key}"] = [name for name in entries if name in tasks]
            if isinstance(entries, DictConfig):
                changes[f"{pool}.{key}"] = {
                    name: entry
                    for name, entry in unresolved(entries).items()
                    if name in tasks or name.startswith("_")
                }
    return changes


AXES: dict[str, Callable[[str, Any, DictConfig], Axis]] = {
    "tasks": _task_subsets,
    "corruption": corruption_axis,
    "source": source_axis,
}
"""Axes that change more than a setting; to add one, write its function and name it here."""
