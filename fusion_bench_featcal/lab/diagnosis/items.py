"""Items of a diagnosis: a sample of each task's test split."""

import logging
from collections.abc import Sequence
from typing import Any

from fusion_bench_featcal.calibration_data import samples_used
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)

LEAST = 2
"""Smallest number of items per task. Principal directions need at least two."""


def open_items(
    inputs: MethodInputs, tasks: Sequence[str] | None, settings: FeatCalSettings, split: str
) -> dict[str, Any]:
    """Draw batches of items of each task, in the same way as calibration samples.

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
    return {task: batches[task] for task in tasks}
