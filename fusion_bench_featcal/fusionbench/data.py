"""Calibration samples: a few images or texts per task, drawn from a model pool's datasets."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from fusion_bench_featcal.data.derived_images import corrupted
from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.data.image_batches import TaskBatches, decode_workers
from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.loading import naming_setting
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint
from fusion_bench_featcal.fusionbench.own_data import data_setting
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.models.hub import note_data_set
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.samples import warn_of_few_samples

# Model pool -> (split, task) -> number of samples. A run opens its datasets several times, but
# warns of a small one only once.
_SIZES: WeakKeyDictionary[Any, dict[tuple[str, str], int]] = WeakKeyDictionary()


def calibration_batches(
    modelpool: Any,
    task_names: Sequence[str],
    settings: FeatCalSettings,
    processor: Any,
    *,
    device: Any = None,
) -> dict[str, Any]:
    """Draw every task's calibration samples from a model pool.

    Datasets are opened at once. Images are read in each iteration, texts in the first. A task's
    samples depend only on the seed, its name and its dataset. With one seed, fewer samples are a
    prefix of more samples. If a task has too few, all are used, with one warning.

    Args:
        modelpool: A FusionBench model pool with datasets for the tasks.
        task_names: The tasks.
        settings: The settings for samples.
        processor: Result of `load_input_processor`: a tokenizer, a transformers processor, or a
            callable from an RGB picture to a tensor `[channels, height, width]`.
        device: Device on which experts generate targets, by default the one they are loaded on.

    Returns:
        Task name -> batches `{"pixel_values": [batch, channels, height, width]}`, floating point,
        or `{"input_ids", "attention_mask", "labels"}`, each `[batch, length]`, int64.

    Raises:
        CalibrationError: If a task has no data, or its data cannot be loaded or is empty. During
            iteration, if a sample cannot be read, images differ in size, or a text is empty or too
            long.
    """
    split = settings.calibration_split
    check_tasks_have_data(modelpool, task_names, split)
    kind = text_kind(modelpool)
    if kind is not None:
        if kind == "classification" and settings.calibration_targets == "generated":
            raise CalibrationError(
                f"method.calibration_targets=generated: {type(modelpool).__name__} has "
                "classifiers, which generate nothing. Set method.calibration_targets=labels: a "
                "classifier's labels are not read"
            )
        if settings.calibration_corruption is not None:
            raise CalibrationError(
                f"method.calibration_corruption changes images, and {type(modelpool).__name__} "
                "reads texts. Set it to null"
            )
        encoder = TextEncoder(processor, kind, settings.max_length)
        return {
            task: TextBatches(
                rows,
                indices,
                settings,
                encoder,
                partial(load_pool_model, modelpool, task),
                device,
            )
            for task, rows, indices in _draw_samples(modelpool, task_names, settings)
        }
    size, workers = settings.batch_size, decode_workers(processor)
    batches = {}
    for task, rows, indices in _draw_samples(modelpool, task_names, settings):
        images = corrupted_for(task, rows, settings)
        batches[task] = TaskBatches(task, images, indices, size, processor, split, workers)
    return batches


def corrupted_for(task: str, rows: ImageItems, settings: FeatCalSettings) -> ImageItems:
    """Return a task's images with `calibration_corruption`."""
    change = settings.calibration_corruption
    if change is None:
        return rows
    changed = corrupted(rows, change["kind"], change["severity"], settings.seed, task)
    return ImageItems(changed, name=rows.name)


def check_tasks_have_data(modelpool: Any, task_names: Iterable[str], split: str) -> None:
    """Refuse a pool without data of a split for a task.

    Raises:
        CalibrationError: If a task has none. The message lists the tasks that have data.
    """
    available = list(getattr(modelpool, f"{split}_dataset_names"))
    for task in task_names:
        if task not in available:
            raise CalibrationError(
                f"task {task!r} has no calibration data{nearest_hint(task, available)}: set "
                f"modelpool.{split}_datasets.{task} or method.calibration_split (now {split}), or "
                f"with method=featcal +method.calibration_data.{task} (a path, a hub id or a data "
                f"set's config). The pool's {split}_datasets are: {', '.join(available) or 'none'}."
            )


def _draw_samples(
    modelpool: Any, task_names: Iterable[str], settings: FeatCalSettings
) -> Iterator[tuple[str, Any, list[int]]]:
    """Yield each task, its open dataset and the positions of its samples."""
    for task in task_names:
        rows = _open(modelpool, task, settings.calibration_split)
        indices = draw_samples(len(rows), task, settings)
        _note_size(modelpool, task, len(rows), settings)
        yield task, rows, indices


def draw_samples(available: int, task: str, settings: FeatCalSettings) -> list[int]:
    """Draw one task's samples without replacement, seeded by the seed and the task's name.

    Returns:
        `samples_per_task` distinct positions below `available`, or all of them if there are fewer,
        in random order.

    Raises:
        CalibrationError: If the task has no samples.
    """
    if available == 0:
        raise CalibrationError(
            f"task {task!r} has 0 samples in modelpool.{settings.calibration_split}_datasets."
            f"{task}. Give it data, or choose another method.calibration_split."
        )
    return sample_order(available, task, settings.seed)[: settings.samples_per_task]


def samples_used(
    modelpool: Any, tasks: Iterable[str], most: int, split: str
) -> dict[str, dict[str, Any]]:
    """Return the number of samples, at most `most`, that are drawn from each task's data.

    Returns:
        Task -> `{"samples": number, "split": split}`, for the tasks that have data.
    """
    sizes = _sizes_of(modelpool)
    used: dict[str, dict[str, Any]] = {}
    for task in tasks:
        if task not in getattr(modelpool, f"{split}_dataset_names"):
            continue
        if (split, task) not in sizes:
            sizes[split, task] = len(_open(modelpool, task, split))
        used[task] = {"samples": min(most, sizes[split, task]), "split": split}
    return used


def _sizes_of(modelpool: Any) -> dict[tuple[str, str], int]:
    try:
        return _SIZES.setdefault(modelpool, {})
    except TypeError:  # the pool allows no weak reference
        return {}


def _note_size(modelpool: Any, task: str, size: int, settings: FeatCalSettings) -> None:
    """Store a dataset's size. The first time, warn if it has too few samples."""
    key, sizes = (settings.calibration_split, task), _sizes_of(modelpool)
    if size < settings.samples_per_task and sizes.get(key) != size:
        warn_of_few_samples(task, size, settings.samples_per_task)
    sizes[key] = size


def open_labelled(modelpool: Any, task: str, split: str) -> ImageItems:
    """Open a task's images with labels, which calibration does not read.

    Raises:
        CalibrationError: If they cannot be loaded, or a label is not a class.
    """
    return _open(modelpool, task, split, label_column="label")


def _entry(modelpool: Any, task: str, split: str) -> Any:
    """Return the pool's entry for a task's dataset: a path, a hub id, a configuration or None."""
    return (getattr(modelpool, f"_{split}_datasets", None) or {}).get(task)


def load_rows(modelpool: Any, task: str, split: str) -> Any:
    """Load a task's dataset, from a file or folder in the pool's entry, else by the pool."""
    entry = _entry(modelpool, task, split)
    if isinstance(entry, str) and text_kind(modelpool) is not None:
        return load_texts(entry, split)
    if isinstance(entry, str) and Path(entry).expanduser().exists():
        return load_images(entry)
    return getattr(modelpool, f"load_{split}_dataset")(task)  # a configuration or a hub id


def _open(modelpool: Any, task: str, split: str, *, label_column: str | None = None) -> Any:
    """Open a task's dataset without reading its items."""
    setting = data_setting(modelpool, task, split)
    entry = _entry(modelpool, task, split)
    path = entry.get("path") if isinstance(entry, Mapping) else entry
    is_text = text_kind(modelpool) is not None
    with naming_setting(setting, path if isinstance(path, str) else None):
        rows = load_rows(modelpool, task, split)
        note_data_set(rows)
        if is_text:
            return TextRows(rows, f"task {task!r}, {setting}")
        return ImageItems(rows, name=f"task {task!r}, {setting}", label_column=label_column)
