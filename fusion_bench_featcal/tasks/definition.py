"""Image tasks: their definition in YAML, and their test items with class names and prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_bench.tasks.clip_classification import CLIPTemplateFactory

from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.loading import unloadable
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.fusionbench.run_settings import plain_config
from fusion_bench_featcal.settings.fields import check_values, setting

Templates = Sequence[Callable[[str], str]]

DEFAULT_TEMPLATE = "a photo of a {}."


def _are_names(value: Any) -> bool:
    kinds = (str, int, float)  # and no bool
    are_names = isinstance(value, list | tuple) and all(type(name) in kinds for name in value)
    return are_names and len(set(map(str, value))) == len(value) > 0


def _are_templates(value: object) -> bool:
    texts = value if isinstance(value, list | tuple) and value else [value]
    return all(isinstance(text, str) and "{}" in text for text in texts)


@dataclass(frozen=True, kw_only=True)
class TaskDefinition:
    """One task. The fields are the keys under `tasks.<name>` in YAML."""

    data: Any | None = setting(
        None,
        "Folder, table, hub id, or mapping that builds a dataset. Null: the data in test_datasets.",
        accepts="a path, a hub id or a mapping with _target_",
        check=lambda v: isinstance(v, str) or (isinstance(v, Mapping) and "_target_" in v),
    )
    split: str | None = setting(None, "Split of a folder or a hub dataset.")
    image_column: str = setting("image", "Column of the images or their paths.")
    label_column: str = setting("label", "Column of the labels.")
    classnames: Sequence[str] | None = setting(
        None,
        "Class names by number. Null: the names in the data or in FusionBench.",
        accepts="a list of different names, one per label (yes, no, on and off in quotes)",
        check=_are_names,
    )
    templates: Sequence[str] | None = setting(
        None,
        'Prompts. Null: those of FusionBench or "a photo of a {}."',
        accepts="prompts with {} for the class name, as in 'a photo of a {}.'",
        check=_are_templates,
    )


def parse_tasks(tasks: object, name: str = "taskpool.tasks") -> dict[str, TaskDefinition]:
    """Parse the mapping `tasks` of a task pool.

    Raises:
        ValueError: If there is an unknown key or an invalid value. The message names both.
    """
    tasks = plain_config(tasks)
    if not isinstance(tasks, Mapping | None):
        raise ValueError(f"{name} must be a mapping from task names to tasks, got {tasks!r}")
    parsed = {}
    for task, keys in (tasks or {}).items():
        if not isinstance(keys, Mapping | None):
            raise ValueError(f"{name}.{task} must be a mapping with a key data, got {keys!r}")
        check_values(TaskDefinition, keys or {}, f"{name}.{task}.")
        parsed[str(task)] = TaskDefinition(**keys or {})
    return parsed


@dataclass(frozen=True)
class OpenTask:
    """A task with its test items, class names and prompts."""

    items: ImageItems
    classnames: list[str]
    templates: Templates


def open_task(name: str, task: TaskDefinition, rows: object, setting: str) -> OpenTask:
    """Open a task's items, with FusionBench's class names and prompts if it knows the task.

    Other tasks are registered with FusionBench, for all of its CLIP classes.

    Args:
        name: Name of the task.
        task: Its definition.
        rows: The dataset, its path or its hub id. Loading it may have registered class names.
        setting: The setting with the data, for messages.

    Raises:
        ValueError: If both FusionBench and the definition have class names or prompts, or neither
            they nor the data have class names.
        CalibrationError: If the data do not exist, cannot be read or are unlabeled, or a label is
            not a class.
    """
    key = f"taskpool.tasks.{name}"
    entry = _entry(name)
    if entry is not None and (task.classnames or task.templates):
        raise ValueError(
            f"{key}: FusionBench has class names and templates for {name!r}. Leave yours out to "
            f"use them, or rename the task, its expert and its data, say to 'my_{name}'"
        )
    classnames = entry[0] if entry else task.classnames and [*map(str, task.classnames)]
    with error_context(setting, cause=unloadable):
        items = _items(task, classnames, rows, setting)
    if not items.has_labels:
        raise CalibrationError(
            f"{setting}: {items.name} has no labels (label_column {task.label_column!r}, or "
            "folders named by class), so accuracy cannot be measured"
        )
    if items.classnames is None:
        raise ValueError(f"{key}: the data has no class names: set classnames, one per label")
    items.name = f"task {name!r}, {items.name}"
    if entry is not None:
        return OpenTask(items, *entry)
    return OpenTask(items, items.classnames, _register(name, items.classnames, task.templates))


def _items(
    task: TaskDefinition, classnames: Sequence[str] | None, rows: object, setting: str
) -> ImageItems:
    """Return a task's items. The split `test` is the default for data from `test_datasets`."""
    columns: Any = {"image_column": task.image_column, "label_column": task.label_column}
    columns["classnames"] = classnames
    if isinstance(rows, str):
        usual = "test" if task.data is None else None
        return load_images(rows, task.split, usual_split=usual, **columns)
    if task.split is not None:
        raise ValueError(
            f"split {task.split!r} has no effect on a dataset that _target_ builds: set it as one "
            "of its keys"
        )
    return ImageItems(rows, name=setting.partition(".")[2], **columns)


class _OwnTask(dict):
    """An entry of FusionBench's table of tasks that was made from a definition in YAML."""


def _entry(task: str) -> tuple[list[str], Templates] | None:
    """Return class names and prompts of FusionBench or another plugin for a task, or None."""
    table: Mapping[str, object] = CLIPTemplateFactory._dataset_mapping
    if task not in table or isinstance(table[task], _OwnTask):
        return None
    classnames, templates = CLIPTemplateFactory.get_classnames_and_templates(task)
    return list(classnames), list(templates)


def _register(task: str, classnames: list[str], templates: Any) -> Templates:
    """Register class names and prompts in FusionBench's table, and return the prompts.

    FusionBench's `register_dataset` fails in release 0.2.33, so its table is written directly.
    """
    texts = [templates] if isinstance(templates, str) else templates or [DEFAULT_TEMPLATE]
    prompts = [lambda name, text=text: text.replace("{}", name) for text in texts]
    table: dict[str, Any] = CLIPTemplateFactory._dataset_mapping
    table[task] = _OwnTask(classnames=classnames, templates=prompts)
    return prompts
