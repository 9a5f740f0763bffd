"""Image tasks: their definition in YAML, and their test items with class names and prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.labels import check_classnames_by
from fusion_bench_featcal.data.pictures import parse_background
from fusion_bench_featcal.nearest_names import refuse_unknown_keys
from fusion_bench_featcal.setting_checks import Check
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tasks.heads import (
    PromptTemplate,
    Templates,
    known_names,
    names_of,
    register_names,
)
from fusion_bench_featcal.tasks.pool_settings import build_part


@dataclass(frozen=True, kw_only=True)
class TaskDefinition:
    """One task, checked. Its fields are the keys under `tasks.<name>` in YAML."""

    # A folder, a table or a hub id (see `load_images`, which most other keys are of too), or a
    # mapping with `_target_` that builds a data set. None where `test_datasets` has the data.
    data: str | Mapping[str, Any] | None = None
    split: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    classnames: tuple[str, ...] | None = None  # None: the data's own, or FusionBench's
    # With {} for the class name. None: FusionBench's for this task, or "a photo of a {}."
    templates: tuple[PromptTemplate, ...] | None = None
    background: str | None = None
    classnames_by: str = "name"

    def items(self, rows: Any = None, place: str = "") -> ImageItems:
        """Return the task's items: of `data`, or of another data set that `place` names.

        Raises:
            ValueError: If the path, the split or a column does not exist, or class names do not
                fit.
            CalibrationError: If the data cannot be read, or a label is out of range.
        """
        keys = ("image_column", "label_column", "classnames", "background", "classnames_by")
        columns = {key: getattr(self, key) for key in keys}
        if rows is not None:
            return ImageItems(rows, place=place, **columns)
        if isinstance(self.data, str):
            return load_images(self.data, self.split, **columns)
        if self.data is None:
            raise ValueError("data is not set")
        place = f"data from {self.data.get('_target_')}"
        return ImageItems(self._built(self.data), place=place, **columns)

    def _built(self, data: Mapping[str, Any]) -> Any:
        rows = build_part("data", OmegaConf.create(dict(data)))
        if isinstance(rows, Mapping):  # load_dataset without a split gives all of them
            if self.split not in rows:
                raise ValueError(
                    f"the data has splits {', '.join(map(str, rows))}; split is {self.split!r}"
                )
            return rows[self.split]
        if self.split is not None:
            raise ValueError(
                f"split {self.split!r} has no effect where data._target_ builds one data set: "
                "set it among the keys of data"
            )
        return rows


def parse_tasks(tasks: Any, place: str = "taskpool.tasks") -> dict[str, TaskDefinition]:
    """Read the `tasks:` mapping of a task pool, which stands at `place` in the configuration.

    Raises:
        ValueError: Naming the task, the key and the value, for unknown keys and unfit values.
    """
    if isinstance(tasks, DictConfig):
        tasks = OmegaConf.to_container(tasks, resolve=True)
    if tasks is None:
        return {}
    if not isinstance(tasks, Mapping):
        raise ValueError(f"{place} must be a mapping from task names to tasks, got {tasks!r}")
    return {str(name): _parse(task, f"{place}.{name}") for name, task in tasks.items()}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _is_data(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and "_target_" in value)


_CHECKS: dict[str, Check] = {
    "data": ("a path, a hub id or a mapping with _target_", _is_data),
    "split": ("a text", _is_text),
    "image_column": ("a text", _is_text),
    "label_column": ("a text", _is_text),
    "classnames": ("a list of names, one for each label", _is_list),
    "templates": ("a list of prompts", lambda value: isinstance(value, str) or _is_list(value)),
}
_MAY_BE_NONE = {"data", "split", "classnames", "templates"}


def _parse(task: Any, place: str) -> TaskDefinition:
    if not isinstance(task, Mapping):
        raise ValueError(f"{place} must be a mapping with a key data, got {task!r}")
    refuse_unknown_keys(task, [field.name for field in fields(TaskDefinition)], place)
    values: dict[str, Any] = {
        key: value for key, value in task.items() if value is not None or key not in _MAY_BE_NONE
    }
    for key, (wanted, accepts) in _CHECKS.items():
        if key in values and not accepts(values[key]):
            raise ValueError(f"{place}.{key} must be {wanted}, got {values[key]!r}")
    parse_background(values.get("background"), place)
    check_classnames_by(values.get("classnames_by", "name"), place)
    if "classnames" in values:
        values["classnames"] = _classnames(values["classnames"], f"{place}.classnames")
    if "templates" in values:
        values["templates"] = _templates(values["templates"], f"{place}.templates")
    return TaskDefinition(**values)


def _classnames(values: Sequence[Any], place: str) -> tuple[str, ...]:
    for name in values:
        if isinstance(name, bool) or not isinstance(name, str | int | float):
            raise ValueError(
                f"{place}: {name!r} is no name. Write it in quotes: YAML reads yes, no, on and "
                "off as true and false, and an empty entry as null."
            )
    names = tuple(str(name) for name in values)
    if len(set(names)) < len(names):
        twice = min(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"{place}: {twice!r} stands there twice; prompts could not tell them apart"
        )
    return names


def _templates(texts: Any, place: str) -> tuple[PromptTemplate, ...]:
    texts = [texts] if isinstance(texts, str) else texts
    for text in texts:
        if not isinstance(text, str) or "{}" not in text:
            raise ValueError(
                f"{place}: {text!r} has no {{}} for the class name, as in 'a photo of a {{}}.'"
            )
    return tuple(PromptTemplate(text) for text in texts)


@dataclass(frozen=True)
class OpenTask:
    """A task with its test items, class names and prompts."""

    items: ImageItems
    classnames: list[str]
    templates: Templates


def open_task(name: str, task: TaskDefinition, rows: Any = None) -> OpenTask:
    """`load_task` with FusionBench's class names, if it has any; it learns those of other tasks.

    Raises:
        ValueError: If class names clash with FusionBench's.
    """
    known = known_names(name)
    items = load_task(name, task, None if known is None else known[0], rows)
    register_names(name, items.classnames or (), task.templates)
    return OpenTask(items, *names_of(name))


def load_task(
    name: str, task: TaskDefinition, classnames: Sequence[str] | None = None, rows: Any = None
) -> ImageItems:
    """Load one task's data for evaluation: labelled, with class names.

    Args:
        name: The task.
        task: Its definition.
        classnames: Class names where the definition has none.
        rows: The data set where the definition names none.

    Raises:
        ValueError: If the definition does not fit the data.
        CalibrationError: If the data cannot be read, is unlabeled or has labels out of range.
    """
    place = f"taskpool.tasks.{name}"
    if task.classnames is None and classnames is not None:
        # Only a data set with integers of its own has an order to rely on: folders are just sorted.
        is_sorted = isinstance(rows, ImageItems) or (
            isinstance(task.data, str) and Path(task.data).expanduser().is_dir()
        )
        by = "either" if task.classnames_by == "name" and not is_sorted else task.classnames_by
        task = replace(task, classnames=tuple(classnames), classnames_by=by)
    try:
        items = task.items(rows, f"test_datasets.{name}")
    except (ValueError, CalibrationError) as error:
        kind = CalibrationError if isinstance(error, CalibrationError) else ValueError
        raise kind(f"{place}: {error}") from error
    if items.has_labels is False:
        raise CalibrationError(
            f"{place}: {items.place} has no labels (label_column {task.label_column!r}, or "
            "folders named by class), so accuracy cannot be measured."
        )
    if items.classnames is None:
        raise ValueError(f"{place}: the data names no classes: set classnames, one for each label.")
    items.place = f"task {name!r}, {items.place}"
    return items


def check_background(task: str, tested: Any, modelpool: Any) -> None:
    """Refuse calibration images that are composited on another colour than a task's test images.

    Raises:
        ValueError: If the two colours differ.
    """
    for split in ("train", "val", "test"):
        data = (getattr(modelpool, f"_{split}_datasets", None) or {}).get(task)
        if data is None:
            continue
        place, used = f"modelpool.{split}_datasets.{task}", background_of(data)
        if parse_background(used, place) != parse_background(tested, f"taskpool.tasks.{task}"):
            raise ValueError(
                f"{place}: transparent images are composited on {used or 'white'} here, and on "
                f"{tested or 'white'} for evaluation: set the same background here and in "
                f"taskpool.tasks.{task}"
            )


def background_of(data: Any) -> Any:
    """Return the `background` of a data set, or of its configuration (or of that one's `data`)."""
    if not isinstance(data, Mapping):
        return getattr(data, "background", None)
    inner = data.get("data")
    return data.get("background") or (background_of(inner) if isinstance(inner, Mapping) else None)
