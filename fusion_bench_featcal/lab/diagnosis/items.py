"""Items of a diagnosis: a sample of each task's test split, with classes."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusion_bench_featcal.calibration_data import open_labelled, samples_used
from fusion_bench_featcal.calibration_images import TaskBatches
from fusion_bench_featcal.families.rows import NO_TARGET
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.tasks.heads import known_names

log = logging.getLogger(__name__)

LEAST = 2
"""Smallest number of items per task. Principal directions need at least two."""


@dataclass(frozen=True)
class TaskItems:
    """Items of one task.

    Attributes:
        batches: Batches of the model's inputs.
        classes: Class of each item, or None if unknown or if almost all are different.
    """

    batches: Any
    classes: list[str] | None


def open_items(
    inputs: MethodInputs, tasks: Sequence[str] | None, settings: FeatCalSettings, split: str
) -> dict[str, TaskItems]:
    """Draw items of each task, in the same way as calibration samples.

    Args:
        inputs: The pools.
        tasks: The tasks, by default all with an expert.
        settings: At most `samples_per_task` items, `seed`, `batch_size` and `max_length`.
        split: Split of the items.

    Raises:
        CalibrationError: If a task has no expert or fewer than two items, or its data cannot be
            loaded.
    """
    experts = list(inputs.modelpool.model_names)
    for task in set(tasks or ()) - set(experts):
        raise CalibrationError(
            f"method.tasks: the model pool has no expert {task!r}{nearest_hint(task, experts)}; it "
            f"has {', '.join(experts)}"
        )
    tasks = tasks or experts
    sizes = samples_used(inputs.modelpool, tasks, settings.samples_per_task, split)
    for task in tasks:
        samples = sizes[task]["samples"] if task in sizes else 0
        if samples < LEAST:
            raise CalibrationError(
                f"task {task!r} has {counted(samples, 'item')} of the {split} split, a diagnosis "
                f"needs {LEAST}: set modelpool.{split}_datasets.{task} (the task pool's data are "
                "only evaluated), method.split, or method.tasks without it"
            )
    draw = {"calibration_split": split, "calibration_data": None, "calibration_targets": "labels"}
    batches = inputs.batches(settings.replace(**draw))
    return {task: TaskItems(batches[task], _classes(inputs, task, batches[task])) for task in tasks}


def are_shared(classes: Sequence[str]) -> bool:
    """Return whether texts are classes of items. Almost all free texts are different."""
    return len(set(classes)) <= max(LEAST, len(classes) // 2)


def _classes(inputs: MethodInputs, task: str, batches: Any) -> list[str] | None:
    """Return the class of each item: an image's label, or a text's target."""
    if isinstance(batches, TaskBatches):
        classes = _image_classes(inputs.modelpool, task, batches)
    else:
        classes = [
            inputs.processor.decode(labels[labels != NO_TARGET], skip_special_tokens=True).strip()
            for batch in batches
            for labels in batch["labels"]
        ]
    return classes if classes and are_shared(classes) else None


def _image_classes(modelpool: Any, task: str, batches: TaskBatches) -> list[str] | None:
    try:
        items = open_labelled(modelpool, task, batches.split)
        labels = [items.read(index)[1] for index in batches.indices]
    except (CalibrationError, ValueError) as error:
        log.warning("no classes of task %s: %s", task, error)
        return None
    numbers = [label for label in labels if label is not None]
    if len(numbers) < len(labels):
        return None
    names = items.classnames or (known_names(task) or ([],))[0]
    return [names[label] if label < len(names) else str(label) for label in numbers]
