"""Items that a diagnosis looks at: some of each task's test split, with their classes."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_bench_featcal.calibration_data import open_labelled, samples_used
from fusion_bench_featcal.calibration_images import TaskBatches
from fusion_bench_featcal.families.rows import NO_TARGET
from fusion_bench_featcal.methods.interface import MethodInputs
from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.tasks.heads import known_names

log = logging.getLogger(__name__)

LEAST = 2
"""Fewest items of a task: one has no principal plane, and no interval."""


@dataclass(frozen=True)
class TaskItems:
    """Items of one task.

    Attributes:
        batches: Batches of the model's inputs.
        classes: Class of each item; None where they are not known, or hardly any two items share
            one.
    """

    batches: Any
    classes: list[str] | None


def chosen_tasks(inputs: MethodInputs, tasks: Sequence[str] | None) -> list[str]:
    """The tasks to diagnose: those that are named, or all that have an expert.

    Raises:
        CalibrationError: If a task has no expert.
    """
    known = list(inputs.modelpool.model_names)
    for task in tasks or ():
        if task not in known:
            raise CalibrationError(
                f"method.tasks: the model pool has no expert {task!r}{nearest_hint(task, known)}; "
                f"it has {', '.join(known)}"
            )
    return list(tasks) if tasks else known


def open_items(
    inputs: MethodInputs, tasks: Iterable[str], settings: FeatCalSettings, split: str
) -> dict[str, TaskItems]:
    """Draw items of each task, as calibration samples are drawn; of small tasks take all.

    Args:
        inputs: The pools.
        tasks: The tasks.
        settings: `samples_per_task` items at most, `seed`, `batch_size` and `max_length`.
        split: Their split.

    Raises:
        CalibrationError: If a task has fewer than two items, or its data cannot be loaded.
    """
    pool, tasks = inputs.modelpool, list(tasks)
    available = list(getattr(pool, f"{split}_dataset_names"))
    for task in tasks:
        if task not in available:
            raise CalibrationError(
                f"task {task!r} has no items of the {split} split to diagnose: set "
                f"modelpool.{split}_datasets.{task} (the task pool's data are for its evaluation "
                "alone), method.split, or method.tasks without it (the model pool's "
                f"{split}_datasets are: {', '.join(available) or 'none'})"
            )
    wanted = settings.samples_per_task
    for task, used in samples_used(pool, tasks, wanted, split).items():
        if used["samples"] < LEAST:
            raise CalibrationError(
                f"task {task!r}: {used['samples']} of at least {LEAST} items of the {split} split "
                f"that a diagnosis needs. Check modelpool.{split}_datasets.{task}, or set "
                "method.tasks without it"
            )
    batches = inputs.batches(
        settings.replace(
            calibration_split=split, calibration_data=None, calibration_targets="labels"
        )
    )
    return {task: TaskItems(batches[task], _classes(inputs, task, batches[task])) for task in tasks}


def _classes(inputs: MethodInputs, task: str, batches: Any) -> list[str] | None:
    """Class of each item: an image's label, or a text's target."""
    if isinstance(batches, TaskBatches):
        classes = _image_classes(inputs.modelpool, task, batches)
    else:
        classes = [
            inputs.processor.decode(labels[labels != NO_TARGET], skip_special_tokens=True).strip()
            for batch in batches
            for labels in batch["labels"]
        ]
    return classes if classes is not None and are_shared(classes) else None


def are_shared(classes: Sequence[str]) -> bool:
    """Tell classes of items from free texts, of which hardly any two are equal."""
    return len(set(classes)) <= max(LEAST, len(classes) // 2)


def _image_classes(modelpool: Any, task: str, batches: TaskBatches) -> list[str] | None:
    try:
        items = open_labelled(modelpool, task, batches.split)
        labels = [items.read(index)[1] for index in batches.indices]
    except (CalibrationError, ValueError) as error:  # they are only to group items by
        log.warning("no classes of task %s: %s", task, error)
        return None
    numbers = [label for label in labels if label is not None]
    if len(numbers) < len(labels):
        return None
    names = items.classnames or (known_names(task) or ([],))[0]
    return [names[label] if label < len(names) else str(label) for label in numbers]
