"""Calibration samples: a few images or texts per task, drawn from a model pool's data sets."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.boundary.tokenizers import text_kind
from fusion_bench_featcal.calibration_text import text_batches, text_rows
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.tasks.images import ImageItems
from fusion_bench_featcal.tasks.loading import offline_hint
from fusion_bench_featcal.tasks.names import nearest_hint
from fusion_bench_featcal.tasks.pixels import Processor, stack_pixels, to_pixels


@dataclass(frozen=True, eq=False)
class TaskBatches:
    """One task's calibration samples; images are read and processed anew in each iteration.

    Attributes:
        task: The task's name.
        items: The data set they are drawn from; labels are not read.
        indices: The samples' positions in it.
        batch_size: Samples per batch; the last batch may have fewer.
        processor: Turns an image into a tensor.
    """

    task: str
    items: ImageItems
    indices: list[int]
    batch_size: int
    processor: Processor

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield `{"pixel_values": [batch, channels, height, width]}`, floating point."""
        size: torch.Size | None = None
        for start in range(0, len(self.indices), self.batch_size):
            chosen = self.indices[start : start + self.batch_size]
            pixels = [self._pixels(index) for index in chosen]
            size = size or pixels[0].shape
            yield {
                "pixel_values": stack_pixels(pixels, self.items.place, "modelpool.processor", size)
            }

    def _pixels(self, index: int) -> Tensor:
        image, _ = self.items.read(index)
        return to_pixels(image, self.processor, self.items.at(index), self.items.root)


def calibration_batches(
    modelpool: Any,
    task_names: Sequence[str],
    settings: FeatCalSettings,
    processor: Any,
    *,
    device: Any = None,
) -> dict[str, Any]:
    """Draw every task's calibration samples from a model pool.

    Data sets are opened here, so that a missing one is reported before any work is done; samples
    are read and processed batch by batch when asked for. A task's samples depend on the seed, its
    name and its data set alone: not on the other tasks, nor on the batch size. Fewer samples of one
    seed are the first of more.

    Args:
        modelpool: A FusionBench model pool with data sets for the tasks.
        task_names: The tasks.
        settings: `samples_per_task`, `batch_size`, `seed` and `calibration_split` are used; for
            texts `calibration_targets`, `generated_tokens` and `max_length` besides.
        processor: What `load_input_processor` gives: for a pool of language models its tokenizer;
            else a transformers processor, or a callable from an RGB picture to a tensor
            `[channels, height, width]`.
        device: Where experts generate targets, if they do; None: where they are loaded.

    Returns:
        Task name -> batches `{"pixel_values": [batch, channels, height, width]}`, floating point,
        or `{"input_ids", "attention_mask", "labels"}`, each `[batch, length]`, int64.

    Raises:
        CalibrationError: If a task has no data (naming the tasks that have), its data cannot be
            loaded, or it has fewer samples than asked for; and during iteration, if a sample
            cannot be read, images differ in size, or a text is empty or too long.
    """
    split = settings.calibration_split
    available = list(getattr(modelpool, f"{split}_dataset_names"))
    for task in task_names:
        if task not in available:
            raise CalibrationError(
                f"task {task!r} has no calibration data{nearest_hint(task, available)}: set "
                f"modelpool.{split}_datasets.{task} or method.calibration_split (now {split}). The "
                f"pool's {split}_datasets are: {', '.join(available) or 'none'}."
            )
    is_text = text_kind(modelpool) is not None
    batches: dict[str, Any] = {}
    for task in task_names:
        rows = _open(modelpool, task, split, is_text)
        indices = draw_samples(len(rows), task, settings)
        if is_text:
            batches[task] = text_batches(
                modelpool, task, rows, indices, settings, processor, device
            )
        else:
            batches[task] = TaskBatches(task, rows, indices, settings.batch_size, processor)
    return batches


def draw_samples(available: int, task: str, settings: FeatCalSettings) -> list[int]:
    """Draw one task's samples without replacement.

    Args:
        available: Number of samples the task has.
        task: The task's name; with `settings.seed` it seeds the draw.
        settings: `samples_per_task`, `seed` and `calibration_split` are used.

    Returns:
        `settings.samples_per_task` distinct positions below `available`, in random order.

    Raises:
        CalibrationError: If the task has fewer samples.
    """
    wanted = settings.samples_per_task
    if available < wanted:
        raise CalibrationError(
            f"task {task!r} has {available} samples in "
            f"modelpool.{settings.calibration_split}_datasets, "
            f"fewer than method.samples_per_task (now {wanted}). Lower method.samples_per_task "
            "or give the task more data."
        )
    digest = hashlib.sha256(f"{settings.seed}:{task}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(available, generator=generator)[:wanted].tolist()


def _open(modelpool: Any, task: str, split: str, is_text: bool) -> Any:
    """A task's data set, whose items are read when asked for."""
    setting = f"modelpool.{split}_datasets.{task}"
    try:
        rows = getattr(modelpool, f"load_{split}_dataset")(task)
        if is_text:
            return text_rows(rows, f"task {task!r}, {setting}")
        return ImageItems(rows, place=f"task {task!r}, {setting}", label_column=None)
    except CalibrationError as error:
        raise CalibrationError(f"{setting}: {error}") from error
    # what data sets raise when a path, a split, a column or the network is missing
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = offline_hint() if isinstance(error, OSError) else ""
        raise CalibrationError(f"{setting} cannot be loaded: {error}.{hint}") from error
