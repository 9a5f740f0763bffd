"""Image tasks: their definition in YAML, and their test items with class names and prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.settings.fields import check_values, setting
from fusion_bench_featcal.tasks.heads import (
    PromptTemplate,
    Templates,
    known_names,
    names_of,
    register_names,
)
from fusion_bench_featcal.tasks.item_pool import build_part


def _is_data(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and "_target_" in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _are_names(value: Any) -> bool:
    are_names = _is_list(value) and all(
        isinstance(name, str | int | float) and not isinstance(name, bool) for name in value
    )
    return are_names and len(set(map(str, value))) == len(value)


def _are_templates(value: Any) -> bool:
    texts = value if _is_list(value) else [value]
    return all(isinstance(text, str) and "{}" in text for text in texts)


@dataclass(frozen=True, kw_only=True)
class TaskDefinition:
    """One task. Its fields are the keys under `tasks.<name>` in YAML."""

    data: Any | None = setting(
        None,
        "Folder, table, hub id, or mapping that builds a dataset. null: test_datasets has it.",
        accepts="a path, a hub id or a mapping with _target_",
        check=_is_data,
    )
    split: str | None = setting(None, "Split of a folder or a hub dataset.")
    image_column: str = setting("image", "Column of the images or their paths.")
    label_column: str = setting("label", "Column of the labels.")
    classnames: Sequence[str] | None = setting(
        None,
        "Class names by label. null: those of the data or of FusionBench.",
        accepts="a list of different names, one per label (yes, no, on and off in quotes)",
        check=_are_names,
    )
    templates: Sequence[PromptTemplate] | None = setting(
        None,
        'Prompts. null: those of FusionBench or "a photo of a {}."',
        accepts="prompts with {} for the class name, as in 'a photo of a {}.'",
        check=_are_templates,
    )
    classnames_by: str = setting(
        "name", "Rule that matches the data's class names.", choices=("name", "order")
    )

    def items(self, rows: Any = None, name: str = "") -> ImageItems:
        """Return the task's items, from `data` or from another dataset with its name.

        Raises:
            ValueError: If the path, the split or a column does not exist, or class names do not
                fit.
            CalibrationError: If the data cannot be read, or a label is out of range.
        """
        keys = ("image_column", "label_column", "classnames", "classnames_by")
        columns = {key: getattr(self, key) for key in keys}
        if isinstance(self.data, str):
            return load_images(self.data, self.split, **columns)
        if self.data is not None:
            name = f"data from {self.data.get('_target_')}"
            rows = build_part("data", OmegaConf.create(dict(self.data)))
            if isinstance(rows, Mapping) and self.split in rows:
                rows = rows[self.split]
            elif self.split is not None:
                raise ValueError(
                    f"split {self.split!r} has no effect where data._target_ builds one dataset: "
                    "set it among the keys of data"
                )
        return ImageItems(rows, name=name, **columns)


def parse_tasks(tasks: Any, name: str = "taskpool.tasks") -> dict[str, TaskDefinition]:
    """Parse the mapping `tasks` of a task pool.

    Raises:
        ValueError: If it has an unknown key or an invalid value, with task, key and value.
    """
    if isinstance(tasks, DictConfig):
        tasks = OmegaConf.to_container(tasks, resolve=True)
    if not isinstance(tasks, Mapping | None):
        raise ValueError(f"{name} must be a mapping from task names to tasks, got {tasks!r}")
    return {str(key): _parse(task, f"{name}.{key}") for key, task in (tasks or {}).items()}


def _parse(task: Any, name: str) -> TaskDefinition:
    if not isinstance(task, Mapping):
        raise ValueError(f"{name} must be a mapping with a key data, got {task!r}")
    check_values(TaskDefinition, task, f"{name}.")
    definition = TaskDefinition(**task)
    classnames, texts = definition.classnames, definition.templates
    texts = [texts] if isinstance(texts, str) else texts
    return replace(
        definition,
        classnames=None if classnames is None else tuple(map(str, classnames)),
        templates=None if texts is None else tuple(PromptTemplate(str(text)) for text in texts),
    )


@dataclass(frozen=True)
class OpenTask:
    """A task with its test items, class names and prompts."""

    items: ImageItems
    classnames: list[str]
    templates: Templates


def open_task(name: str, task: TaskDefinition, rows: Any = None) -> OpenTask:
    """Open a task's items. FusionBench's class names are used, or the task's are registered there.

    Raises:
        ValueError: If class names clash with FusionBench's, or as `load_task`.
        CalibrationError: As `load_task`.
    """
    entry = known_names(name)
    items = load_task(name, task, None if entry is None else entry[0], rows)
    register_names(name, items.classnames or (), task.templates)
    return OpenTask(items, *names_of(name))


def load_task(
    name: str, task: TaskDefinition, classnames: Sequence[str] | None = None, rows: Any = None
) -> ImageItems:
    """Load one task's labelled items and class names.

    Args:
        name: Name of the task.
        task: Its definition.
        classnames: FusionBench's class names, used if the definition has none.
        rows: The dataset if the definition names none.

    Raises:
        ValueError: If the definition does not fit the data.
        CalibrationError: If the data cannot be read, is unlabeled or has labels out of range.
    """
    key = f"taskpool.tasks.{name}"
    if task.classnames is None and classnames is not None:
        # Folders are sorted by name. Only a dataset with integer labels has an order.
        is_sorted = isinstance(rows, ImageItems) or (
            isinstance(task.data, str) and Path(task.data).expanduser().is_dir()
        )
        by = "either" if task.classnames_by == "name" and not is_sorted else task.classnames_by
        task = replace(task, classnames=tuple(classnames), classnames_by=by)
    try:
        items = task.items(rows, f"test_datasets.{name}")
    except (OSError, ValueError, CalibrationError) as error:
        kind = ValueError if isinstance(error, ValueError) else CalibrationError
        raise kind(f"{key}: {error}") from error
    if items.has_labels is False:
        raise CalibrationError(
            f"{key}: {items.name} has no labels (label_column {task.label_column!r}, or "
            "folders named by class), so accuracy cannot be measured."
        )
    if items.classnames is None:
        raise ValueError(f"{key}: the data has no class names: set classnames, one per label.")
    items.name = f"task {name!r}, {items.name}"
    return items
