"""Axes of a study: names and values from YAML, the changes of each value, and their points."""

import itertools
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.lab.compare.data_axes import corruption_axis, source_axis
from fusion_bench_featcal.lab.compare.points import POOLS, Axis, Changes, Option, Point, unresolved
from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results import FEATCAL
from fusion_bench_featcal.setting_fields import Settings, is_integer, is_text_list, setting
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)

# Settings that all methods of a comparison share. Other settings belong to FeatCal.
_SHARED = ("samples_per_task", "calibration_split", "steps")


@dataclass(frozen=True, kw_only=True)
class Design(Settings):
    """Settings of `method=study/<name>` in addition to those of a comparison."""

    study: str = setting("study", "Name of the study, for titles.")
    axes: Any = setting(
        None,
        "Axes of the study.",
        accepts="a mapping of names to values, or to labels with changes of dotted keys",
        check=lambda value: value is None or isinstance(value, Mapping),
    )
    seeds: Any = setting(
        None,
        "Seeds of mergers and methods at each point; intervals need two or more.",
        accepts="a list of at least one integer >= 0",
        check=lambda value: value is None or _are_seeds(value),
    )
    design: str = setting(
        "product",
        "Product of all axes, or each axis by itself around the present settings.",
        choices=("product", "each"),
    )
    pairs: Any = setting(
        (),
        "With design=each: pairs of axes, whose product is added.",
        accepts="a list of pairs of axes",
        check=lambda value: all(is_text_list(pair) and len(pair) == 2 for pair in value or ()),
    )
    subsets: int | None = setting(
        None, "Largest number of subsets for each number of tasks. Null: all.", ge=1
    )
    over: Any = setting(
        (), "Labels that are averaged over.", accepts="a list of names", check=is_text_list
    )
    against: Any = setting(
        None,
        "Rows that are compared with another one, where the study has one point.",
        accepts="a mapping of a row to a list of rows, as in {featcal: ['featcal:plus']}",
        check=lambda value: (
            value is None or (isinstance(value, Mapping) and all(map(is_text_list, value.values())))
        ),
    )
    columns: Any = setting(
        (),
        "Columns of a comparison that get a table by point, such as seconds.",
        accepts="a list of names",
        check=is_text_list,
    )

    def points(self, config: DictConfig) -> list[Point]:
        """Return all points, with equal pools next to each other as far as possible.

        Args:
            config: The program's config, with interpolations.

        Raises:
            ValueError: If an axis is unknown or a value does not fit.
        """
        entries = (self.axes or {}).items()
        axes = [make_axis(str(name), v, config) for name, v in entries if v is not None]
        self._check_names(axes)
        options = _product(axes) if self.design == "product" else self._around(axes)
        seeds = [int(config.method.get("seed", 42))] if self.seeds is None else self.seeds
        first: dict[Any, Option] = {}
        for option in options:
            first.setdefault(tuple(option.labels.items()), option)
        return [
            Point(labels=option.labels, changes=option.changes, seed=seed)
            for option in first.values()
            for seed in dict.fromkeys(seeds)
        ]

    def _check_names(self, axes: Sequence[Axis]) -> None:
        names = [axis.name for axis in axes]
        for name in itertools.chain.from_iterable(self.pairs or ()):
            if name not in names:
                raise ValueError(
                    f"method.pairs: {name!r} is no axis of this study: {', '.join(names)}"
                )

    def _around(self, axes: Sequence[Axis]) -> list[Option]:
        """Return points on each axis through the centre, and on the plane of each pair."""
        stays: dict[str, Axis] = {}
        for axis in axes:
            if axis.centre is None:
                raise ValueError(
                    f"method.design=each: the axis {axis.name} has no present value to stay at; "
                    "use method.design=product"
                )
            stays[axis.name] = Axis(axis.name, [axis.centre])
        moving = [(), *((axis.name,) for axis in axes), *(self.pairs or ())]
        groups = ([a if a.name in names else stays[a.name] for a in axes] for names in moving)
        return [option for group in groups for option in _product(group)]


def _are_seeds(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(is_integer(v, 0) for v in value)


def _product(axes: Iterable[Axis]) -> list[Option]:
    return [
        Option(
            {name: label for option in options for name, label in option.labels.items()},
            {key: value for option in options for key, value in option.changes.items()},
        )
        for options in itertools.product(*(axis.options for axis in axes))
    ]


def make_axis(name: str, values: Any, config: DictConfig) -> Axis:
    """Return the axis of an entry of `method.axes`.

    Args:
        name: A key of `AXES`, a setting of the comparison or of FeatCal, or any name for changes.
        values: A list of values, or a mapping of labels to changes (dotted key -> value).
        config: The program's config.

    Raises:
        ValueError: If the name is unknown, or a value does not fit.
    """
    values, key = plain(values), f"method.axes.{name}"
    if not isinstance(values, Mapping | list) or not values:
        raise ValueError(
            f"{key} must be a list of values, or labels with their changes, got {values!r}"
        )
    if name in AXES:
        return AXES[name](name, values, config)
    if isinstance(values, Mapping):
        return _labelled(name, values)
    if name == "seed":
        raise ValueError(f"{key}: every point is run with each seed of method.seeds={values}")
    names = (*AXES, *_SHARED, *FeatCalSettings.names())
    if name not in names:
        raise ValueError(
            f"{key} is no axis{nearest_hint(name, names)}; there are {', '.join(AXES)}, the "
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
    for value in values if name in _SHARED else ():  # the grid checks FeatCal's settings
        try:
            FeatCalSettings(**({"batch_size" if name == "steps" else name: value}))
        except ValueError as error:
            reason = str(error).replace("method.batch_size", "method.steps")
            raise ValueError(f"method.axes.{name}: {reason}") from None
    key, default = f"method.{name}", None
    if name not in _SHARED:
        method, default = f"post_merging_methods.{FEATCAL}", getattr(FeatCalSettings, name)
        # The pool's changes of a method come after the method's settings.
        of_pool = OmegaConf.select(config, f"modelpool.featcal.compare.{method}")
        fixed = isinstance(of_pool, DictConfig) and name in of_pool
        key = f"{'modelpool.featcal.compare' if fixed else 'method'}.{method}.{name}"
    present = OmegaConf.select(config, key, default=default)
    options = [Option({name: value}, {key: value}) for value in dict.fromkeys(values)]
    return Axis(name, options, Option({name: present}, {}))


def _labelled(name: str, values: Mapping[str, Any]) -> Axis:
    """Return an axis of named changes. The first one is its centre."""
    for label, changes in values.items():
        if not isinstance(changes, Mapping):
            raise ValueError(
                f"method.axes.{name}.{label} must map dotted keys of the config to values, got "
                f"{changes!r}"
            )
    options = [Option({name: str(label)}, dict(changes)) for label, changes in values.items()]
    return Axis(name, options, options[0])


def _task_subsets(name: str, values: Any, config: DictConfig) -> Axis:
    """Return an axis of numbers of tasks, each with all subsets or `method.subsets` random ones."""
    tasks = [str(task) for task in config.modelpool.get("models", {}) if not task.startswith("_")]
    if len(tasks) < 2:
        raise ValueError(
            f"method.axes.{name} needs a model pool with two experts or more, this one has "
            f"{', '.join(tasks) or 'none'}"
        )
    options = []
    for number in values:
        if not is_integer(number, 2):
            raise ValueError(f"method.axes.{name} must be integers >= 2, got {number!r}")
        if number > len(tasks):
            log.info("the pool has %s: none are merged by %d", counted(len(tasks), "task"), number)
        for subset in _subsets(tasks, number, config.method.get("subsets")):
            labels = {name: number, "subset": "+".join(subset)}
            options.append(Option(labels, _keep_tasks(config, subset)))
    if not options:
        raise ValueError(f"method.axes.{name}={values}: the pool has {counted(len(tasks), 'task')}")
    return Axis(name, options)


def _subsets(tasks: Sequence[str], number: int, most: int | None) -> list[tuple[str, ...]]:
    """Return all subsets of a size, or a sample of them that depends on the tasks only."""
    subsets = list(itertools.combinations(tasks, number))
    if most is None or len(subsets) <= most:
        return subsets
    chosen = random.Random(",".join([*tasks, str(number)])).sample(range(len(subsets)), most)
    return [subsets[index] for index in sorted(chosen)]


def _keep_tasks(config: DictConfig, tasks: Sequence[str]) -> Changes:
    """Return the changes that remove all other tasks from the model pool and the task pool."""
    changes = {}
    for pool in POOLS:
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
"""Axes that change more than one setting. A new one needs a function and an entry here."""
