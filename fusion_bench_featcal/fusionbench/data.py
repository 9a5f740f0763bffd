"""Calibration samples: a few images or texts per task, drawn from a model pool's datasets."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from fusion_bench import BaseModelPool
from omegaconf import OmegaConf

from fusion_bench_featcal.data.batch_sizes import batch_size_of
from fusion_bench_featcal.data.corruptions import corrupted
from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.data.image_batches import ImageBatches
from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.loading import unloadable
from fusion_bench_featcal.data.speech import SpeechBatches, read_speech
from fusion_bench_featcal.data.tables import load_texts, parent_folder, split_location
from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.fusionbench.config_checks import check_tasks_have_data
from fusion_bench_featcal.fusionbench.pool_models import PoolModels, load_pool_model
from fusion_bench_featcal.fusionbench.processors import is_of_speech, text_encoder_class
from fusion_bench_featcal.models.hub import note_data_set
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.samples import warn_of_few_samples

_warn_once = cache(warn_of_few_samples)  # a run opens its datasets several times


def calibration_batches(
    modelpool: BaseModelPool,
    task_names: Sequence[str],
    settings: FeatCalSettings,
    processor: Any,
    models: PoolModels,
    device: torch.device | str | None = None,
) -> dict[str, object]:
    """Draw every task's calibration samples from a model pool.

    Datasets are opened immediately. A task's samples depend only on the seed, the task's name and
    its dataset. With the same seed, a smaller number of samples is a prefix of a larger one. If a
    task has too few samples, all of them are used.

    Args:
        modelpool: A FusionBench model pool with datasets for the tasks.
        task_names: The tasks.
        settings: The settings for samples.
        processor: Result of `load_input_processor`: a tokenizer, a transformers processor, or a
            callable from an RGB picture to a tensor `[channels, height, width]`.
        models: The pool's models, whose files limit texts and name special tokens.
        device: Device on which experts generate targets, by default the one they are loaded on.

    Returns:
        Task name -> batches `{"pixel_values": [batch, channels, height, width]}`, floating point,
        or `{"input_ids", "attention_mask", "labels"}`, each `[batch, length]`, int64. For audio
        `{"input_features": [1, bins, frames], "labels": [1, length]}`.

    Raises:
        CalibrationError: If a task has no data, or its data cannot be loaded or is empty. During
            iteration, if a sample cannot be read, images differ in size, or a text is empty or too
            long.
    """
    split = settings.calibration_split
    check_tasks_have_data(task_names, getattr(modelpool, f"{split}_dataset_names"), split)
    encoder_class, size = text_encoder_class(modelpool), batch_size_of(settings.batch_size, device)
    are_generated = settings.calibration_targets == "generated"
    name, is_of_sounds = type(modelpool).__name__, is_of_speech(modelpool)
    if are_generated and encoder_class is not None and not encoder_class.generates_text:
        raise CalibrationError(
            f"{name} does not generate text: set method.calibration_targets=labels"
        )
    if are_generated and is_of_sounds:
        raise CalibrationError(f"{name} needs transcripts: set method.calibration_targets=labels")
    if encoder_class is not None and settings.calibration_corruption is not None:
        raise CalibrationError(
            f"{name} has texts, not images: set method.calibration_corruption=null"
        )
    batches, encoder = {}, None
    if encoder_class is not None:
        tokenizer = processor.tokenizer if is_of_sounds else processor
        encoder = encoder_class(tokenizer, settings.max_length, models.positions, models.ends)
    for task in task_names:
        rows = _open_data_set(modelpool, task, split, settings)
        indices = draw_samples(len(rows), task, settings)
        if encoder is None:
            batches[task] = ImageBatches(rows, indices, size, processor)
        elif is_of_sounds:
            home = parent_folder(_entry(modelpool, task, split))
            sounds = [read_speech(rows, index, home) for index in indices]
            extractor, start = processor.feature_extractor, models.start
            batches[task] = SpeechBatches(sounds, extractor, encoder, start)
        else:
            load_expert = partial(load_pool_model, modelpool, task)
            batches[task] = TextBatches(rows, indices, settings, encoder, load_expert, device)
    return batches


def with_calibration_data(modelpool: BaseModelPool, settings: FeatCalSettings) -> BaseModelPool:
    """Return a copy of the pool with `calibration_data` in its datasets of `calibration_split`.

    Raises:
        ValueError: If a task has no expert in the pool, with the nearest task that has one.
    """
    entries = settings.calibration_data or {}
    if not entries:
        return modelpool
    refuse_unknown(entries, modelpool.model_names, "method.calibration_data.")
    pool, name = copy.copy(modelpool), f"_{settings.calibration_split}_datasets"
    configured = {
        task: OmegaConf.create(dict(entry)) if isinstance(entry, Mapping) else entry
        for task, entry in entries.items()
    }
    setattr(pool, name, {**(getattr(modelpool, name, None) or {}), **configured})
    return pool


def draw_samples(available: int, task: str, settings: FeatCalSettings) -> list[int]:
    """Draw one task's samples without replacement, seeded by the seed and the task's name.

    Returns:
        `samples_per_task` distinct positions below `available`, in random order. If there are
        fewer, all of them, with one warning.

    Raises:
        CalibrationError: If the task has no samples.
    """
    if available == 0:
        setting = _setting(task, settings.calibration_split, settings)
        raise CalibrationError(
            f"task {task!r} has no samples in {setting}. Add data, or choose another "
            "method.calibration_split."
        )
    if available < settings.samples_per_task:
        _warn_once(task, available, settings.samples_per_task)
    return sample_order(available, task, settings.seed)[: settings.samples_per_task]


def samples_used(
    modelpool: BaseModelPool, tasks: Iterable[str], most: int, split: str
) -> dict[str, dict[str, Any]]:
    """Return the number of samples that are drawn from each task's data, at most `most`.

    Returns:
        Task -> `{"samples": number, "split": split}`, for the tasks that have data.
    """
    names = getattr(modelpool, f"{split}_dataset_names")
    sizes = {task: len(_open_data_set(modelpool, task, split)) for task in tasks if task in names}
    return {task: {"samples": min(most, size), "split": split} for task, size in sizes.items()}


def _open_data_set(
    modelpool: BaseModelPool, task: str, split: str, settings: FeatCalSettings | None = None
) -> Any:
    """Open a task's dataset. Neither its examples nor labels of images are read."""
    setting, is_text = _setting(task, split, settings), text_encoder_class(modelpool) is not None
    name = f"task {task!r}, {setting}"
    entry = _entry(modelpool, task, split)
    path = entry.get("path") if isinstance(entry, Mapping) else entry
    place = f"{setting}={path!r}" if isinstance(path, str) else setting
    with error_context(place, cause=unloadable):
        if isinstance(entry, str) and is_text:
            rows = load_texts(entry, split)
        elif isinstance(entry, str) and Path(split_location(entry)[0]).expanduser().exists():
            rows = load_images(entry, usual_split=split)
        else:  # a configuration or a hub id
            rows = getattr(modelpool, f"load_{split}_dataset")(task)
        note_data_set(rows)
        if is_text:
            return TextRows(rows, name)
        if settings is not None and settings.calibration_corruption is not None:
            change = settings.calibration_corruption
            rows = corrupted(rows, change["kind"], change["severity"], settings.seed, task)
        return ImageItems(rows, name=name, label_column=None)


def _entry(modelpool: BaseModelPool, task: str, split: str) -> Any:
    return (getattr(modelpool, f"_{split}_datasets", None) or {}).get(task)


def _setting(task: str, split: str, settings: FeatCalSettings | None) -> str:
    """Return the setting that names a task's dataset, for messages."""
    is_own = settings is not None and task in (settings.calibration_data or ())
    return f"method.calibration_data.{task}" if is_own else f"modelpool.{split}_datasets.{task}"
