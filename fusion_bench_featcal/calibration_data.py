"""Calibration samples: a few images or texts per task, drawn from a model pool's data sets."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from fusion_bench_featcal.calibration_images import TaskBatches, decode_workers
from fusion_bench_featcal.calibration_text import TextBatches, text_rows
from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.data.image_cache import ImageCache, describe_processor
from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.tables import load_texts, offline_hint
from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.fusionbench.own_data import data_setting
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.hub_errors import hub_error, is_of_hub
from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.settings import PLUS, CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.samples import warn_of_few_samples

log = logging.getLogger(__name__)

_TEXT_SETTINGS = "text settings"

# A run opens its pool's data sets several times, and is warned of them once.
# Model pool -> (split, task) -> number of samples; _TEXT_SETTINGS -> whether they were warned of.
_NOTES: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()


def calibration_batches(
    modelpool: Any,
    task_names: Sequence[str],
    settings: FeatCalSettings,
    processor: Any,
    *,
    device: Any = None,
    images: ImageCache | None = None,
) -> dict[str, Any]:
    """Draw every task's calibration samples from a model pool.

    Data sets are opened here, so that a missing one is reported before any work is done; samples
    are read and processed batch by batch when asked for. A task's samples depend on the seed, its
    name and its data set alone: not on the other tasks, nor on the batch size. Fewer samples of one
    seed are the first of more. A task with fewer than asked for is taken whole, with one warning.

    Args:
        modelpool: A FusionBench model pool with data sets for the tasks.
        task_names: The tasks.
        settings: `samples_per_task`, `batch_size`, `seed` and `calibration_split` are used; for
            texts `calibration_targets`, `generated_tokens` and `max_length` besides, for images
            `decode_workers` and, without `images`, `cache_dir`.
        processor: Result of `load_input_processor`: for a pool of language models its tokenizer;
            else a transformers processor, or a callable from an RGB picture to a tensor
            `[channels, height, width]`.
        device: Device on which experts generate targets, if they do; None: that of loading.
        images: Keeps processed images for further calls with the same pool and processor; None:
            only `cache_dir` does.

    Returns:
        Task name -> batches `{"pixel_values": [batch, channels, height, width]}`, floating point,
        or `{"input_ids", "attention_mask", "labels"}`, each `[batch, length]`, int64.

    Raises:
        CalibrationError: If a task has no data (naming the tasks that have), its data cannot be
            loaded or is empty, or `cache_dir` cannot be written; and during iteration, if a sample
            cannot be read, images differ in size, or a text is empty or too long.
    """
    split = settings.calibration_split
    check_tasks_have_data(modelpool, task_names, split)
    kind = text_kind(modelpool)
    if kind is not None:
        if kind == "classification" and settings.calibration_targets == "generated":
            raise CalibrationError(
                f"method.calibration_targets=generated: {type(modelpool).__name__} holds "
                "classifiers, which write nothing. Set method.calibration_targets=labels: a "
                "classifier's labels are not read"
            )
        encoder = TextEncoder(processor, kind, settings.max_length)
        return {
            task: TextBatches(
                f"task {task!r}, {data_setting(modelpool, task, split)}",
                rows,
                indices,
                settings,
                encoder,
                partial(load_pool_model, modelpool, task),
                device,
            )
            for task, rows, indices in _drawn(modelpool, task_names, settings)
        }
    images = images or ImageCache(folder=settings.cache_dir)
    _warn_of_settings(modelpool, settings, images, processor)
    size, workers = settings.batch_size, decode_workers(settings, processor)
    return {
        task: TaskBatches(task, rows, indices, size, processor, split, workers, images)
        for task, rows, indices in _drawn(modelpool, task_names, settings)
    }


def check_tasks_have_data(modelpool: Any, task_names: Iterable[str], split: str) -> None:
    """Refuse a pool that names no data of a split for a task.

    Raises:
        CalibrationError: Naming the tasks that have data.
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


def _drawn(
    modelpool: Any, task_names: Iterable[str], settings: FeatCalSettings
) -> Iterator[tuple[str, Any, list[int]]]:
    """Yield every task with its opened data set and the positions of its samples."""
    for task in task_names:
        rows = _open(modelpool, task, settings.calibration_split)
        indices = draw_samples(len(rows), task, settings)
        _note_size(modelpool, task, len(rows), settings)
        yield task, rows, indices


def draw_samples(available: int, task: str, settings: FeatCalSettings) -> list[int]:
    """Draw one task's samples without replacement; the seed and the task's name seed the draw.

    Returns:
        `samples_per_task` distinct positions below `available`, or all of them where there are
        fewer, in random order.

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
    modelpool: Any, tasks: Iterable[str], wanted: int, split: str
) -> dict[str, dict[str, Any]]:
    """Number of samples that a draw takes from each task's data of a split, for reports.

    Returns:
        Task -> `{"samples": number, "split": split}`, for the tasks that have data.
    """
    sizes = _notes_of(modelpool)
    used: dict[str, dict[str, Any]] = {}
    for task in tasks:
        if task not in getattr(modelpool, f"{split}_dataset_names"):
            continue
        if (split, task) not in sizes:
            sizes[split, task] = len(_open(modelpool, task, split))
        used[task] = {"samples": min(wanted, sizes[split, task]), "split": split}
    return used


def _notes_of(modelpool: Any) -> dict[Any, int]:
    """Return notes about a pool; of one that allows no weak reference none are kept."""
    try:
        return _NOTES.setdefault(modelpool, {})
    except TypeError:
        return {}


def _warn_of_settings(
    modelpool: Any, settings: FeatCalSettings, images: ImageCache, processor: Any
) -> None:
    """Warn of settings without effect on image models; of those for texts once for each pool."""
    names = ("calibration_targets", "generated_tokens", "max_length", "decoder_rows")
    # FeatCal+ is the same preset for all models.
    usual = {n: (getattr(FeatCalSettings, n), PLUS.get(n)) for n in names}
    changed = [n for n in names if getattr(settings, n) not in usual[n]]
    notes = _notes_of(modelpool)
    if changed and not notes.get(_TEXT_SETTINGS):
        notes[_TEXT_SETTINGS] = True
        log.warning(
            "%s: settings for language models, without effect on %s, which holds image models",
            ", ".join(f"method.{name}" for name in changed),
            type(modelpool).__name__,
        )
    if images.folder is not None and describe_processor(processor) is None:
        log.warning(
            "method.cache_dir has no effect: images are processed by %r, whose settings are "
            "not known; name a transformers processor as modelpool.processor",
            processor,
        )


def _note_size(modelpool: Any, task: str, size: int, settings: FeatCalSettings) -> None:
    """Remember a data set's size; the first time, warn if it is smaller than asked for."""
    split, wanted = settings.calibration_split, settings.samples_per_task
    key, sizes = (split, task), _notes_of(modelpool)
    if size < wanted and sizes.get(key) != size:
        warn_of_few_samples(task, size, wanted)
    sizes[key] = size


def open_labelled(modelpool: Any, task: str, split: str) -> ImageItems:
    """Open a task's images with their labels, which calibration does not read.

    Raises:
        CalibrationError: If they cannot be loaded, or a label is no class.
    """
    return _open(modelpool, task, split, label_column="label")


def _open(modelpool: Any, task: str, split: str, *, label_column: str | None = None) -> Any:
    """A task's data set, whose items are read when asked for."""
    setting = data_setting(modelpool, task, split)
    try:
        is_text = text_kind(modelpool) is not None
        rows = _at_path(modelpool, task, split, is_text=is_text)
        if rows is None:
            rows = getattr(modelpool, f"load_{split}_dataset")(task)
        if is_text:
            return text_rows(rows, f"task {task!r}, {setting}")
        return ImageItems(rows, name=f"task {task!r}, {setting}", label_column=label_column)
    except CalibrationError as error:
        raise CalibrationError(f"{setting}: {error}") from error
    except Exception as error:
        if is_of_hub(error):
            entry = (getattr(modelpool, f"_{split}_datasets", None) or {}).get(task)
            name = entry.get("path") if isinstance(entry, Mapping) else entry
            raise hub_error(error, f"{setting}={name!r}" if name else setting) from error
        # what data sets raise when a path, a split or a column is missing
        if not isinstance(error, OSError | ValueError | KeyError | TypeError):
            raise
        hint, reason = offline_hint() if isinstance(error, OSError) else "", str(error).rstrip(".")
        raise CalibrationError(f"{setting} cannot be loaded: {reason}.{hint}") from error


def _at_path(modelpool: Any, task: str, split: str, *, is_text: bool) -> Any:
    """Open a data set that the pool names by its path alone; None of all others."""
    entry = (getattr(modelpool, f"_{split}_datasets", None) or {}).get(task)
    if not isinstance(entry, str):
        return None
    if is_text:
        return load_texts(entry, split)
    return load_images(entry) if Path(entry).expanduser().exists() else None  # else a hub id
