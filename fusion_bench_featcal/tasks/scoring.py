"""Batches of a task's test images, their cache, and the score of a classifier on them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.data.pictures import Processor, stack_pixels, to_pixels
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.tasks.item_pool import Score

Batch = tuple[Tensor, Tensor]


class EvaluationItems(Dataset):
    """A task's items as pixel values `[channels, height, width]` and label."""

    def __init__(self, items: ImageItems, processor: Processor) -> None:
        self.items = items
        self.processor = processor

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.items.read(index)
        if label is None:
            raise CalibrationError(
                f"{self.items.at(index)} has no label, so accuracy cannot be measured. Check "
                "label_column."
            )
        return to_pixels(image, self.processor, self.items.at(index)), label


def evaluation_loader(items: EvaluationItems, settings: Mapping[str, Any]) -> DataLoader[Batch]:
    """Return batches of all items in order.

    Each is pixels `[batch, channels, height, width]` and labels `[batch]`.
    """
    if not torch.cuda.is_available():  # torch would warn that pinned memory has no effect
        settings = {**settings, "pin_memory": False}
    return DataLoader(items, collate_fn=partial(_collate, items.items.name), **settings)


def _collate(name: str, batch: Sequence[tuple[Tensor, int]]) -> Batch:
    pixels, labels = zip(*batch, strict=True)
    return stack_pixels(pixels, name, "taskpool.processor"), torch.tensor(labels)


def loader_settings(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `dataloader_kwargs` with the default, batches of 128 in the main process.

    Raises:
        ValueError: If they would reorder or drop test items, or torch rejects an argument.
    """
    setting = "taskpool.dataloader_kwargs"
    settings = {"batch_size": 128, "num_workers": 0, **(options or {})}
    for key in ("shuffle", "drop_last"):
        if settings.get(key):
            raise ValueError(f"{setting}.{key} must be false: all test items are used, in order.")
    try:
        DataLoader([], **settings)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{setting}: {error}") from error
    return settings


class PixelCache:
    """Processed batches of several tasks in memory, up to a limit."""

    def __init__(self, limit_mb: float) -> None:
        self.limit_bytes = int(limit_mb * 2**20)
        self.used_bytes = 0
        self._batches: dict[str, list[Batch]] = {}

    def batches(self, task: str, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a task's batches, from the cache or the loader. Store them if all of them fit."""
        if task in self._batches:
            yield from self._batches[task]
            return
        room, size = self.limit_bytes - self.used_bytes, 0
        stored: list[Batch] = []
        for batch in loader:
            size += sum(tensor.nbytes for tensor in batch)
            if size <= room:
                stored.append(batch)
            else:
                stored.clear()
            yield batch
        if size <= room:  # not reached if the caller stops early
            self._batches[task] = stored
            self.used_bytes += size


@torch.no_grad()
def score(
    classifier: nn.Module,
    batches: Iterable[Batch],
    task: str,
    classnames: Sequence[str],
    to_device: Callable[[Tensor], Tensor],
) -> Score:
    """Classify a task's items. The loss is a mean over items (FusionBench's is one over batches).

    Raises:
        CalibrationError: If a logit is not finite, or there are no items.
    """
    correct: list[Tensor] = []
    classes: list[str] = []
    loss_sum = 0.0
    for pixels, labels in batches:
        output = classifier(
            to_device(pixels), return_image_embeds=True, return_dict=True, task_name=task
        )
        logits: Tensor = output["logits"].float()
        if not torch.isfinite(logits).all():
            raise CalibrationError(
                f"task {task!r}: the evaluated model gives logits that are not finite. Look for "
                "NaN or infinite values in its weights, or raise fabric.precision."
            )
        targets = to_device(labels)
        loss_sum += functional.cross_entropy(logits, targets, reduction="sum").item()
        correct.append((logits.argmax(dim=-1) == targets).cpu())
        classes += [classnames[int(label)] for label in labels]
    if not correct:
        raise CalibrationError(
            f"task {task!r} has no test items. Check taskpool.tasks.{task}.data."
        )
    right = torch.cat(correct)
    return Score(right.double().mean().item(), loss_sum / len(right), right, classes)
