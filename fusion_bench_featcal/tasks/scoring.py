"""A task's test images: processed, in batches that are kept in memory, and scored."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.data.pictures import Processor, stack_pixels, to_pixels
from fusion_bench_featcal.nearest_names import refuse_unknown_keys
from fusion_bench_featcal.settings import CalibrationError

Batch = tuple[Tensor, Tensor]

LOADER_DEFAULTS = {"batch_size": 128, "num_workers": 0}


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
        return to_pixels(image, self.processor, *self.items.context(index)), label


def evaluation_loader(items: EvaluationItems, settings: Mapping[str, Any]) -> DataLoader[Batch]:
    """Loader of all items in order: pixels `[batch, channels, height, width]`, labels `[batch]`."""
    if not torch.cuda.is_available():  # torch warns that pinned memory then has no use
        settings = {**settings, "pin_memory": False}
    return DataLoader(items, collate_fn=partial(_collate, items.items.name), **settings)


def _collate(place: str, batch: Sequence[tuple[Tensor, int]]) -> Batch:
    pixels, labels = zip(*batch, strict=True)
    stacked = stack_pixels(pixels, place, "taskpool.processor")
    return stacked, torch.tensor(labels, dtype=torch.int64)


def loader_settings(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check `dataloader_kwargs` and fill in `LOADER_DEFAULTS`.

    Raises:
        ValueError: For unknown arguments, and for those that would reorder or drop test items.
    """
    if isinstance(given, DictConfig):
        given = OmegaConf.to_container(given, resolve=True)  # type: ignore[assignment]
    given = dict(given or {})
    place = "taskpool.dataloader_kwargs"
    reserved = {"self", "dataset", "collate_fn", "sampler", "batch_sampler"}
    valid = [
        name for name in inspect.signature(DataLoader.__init__).parameters if name not in reserved
    ]
    refuse_unknown_keys(given, valid, place)
    for key in ("shuffle", "drop_last"):
        if given.get(key):
            raise ValueError(
                f"{place}.{key} must be false: test items are compared model by model, one by one."
            )
    return LOADER_DEFAULTS | given


class PixelCache:
    """Keeps processed batches of several tasks up to a memory limit."""

    def __init__(self, limit_mb: float) -> None:
        self.limit_bytes = int(limit_mb * 2**20)
        self.used_bytes = 0
        self._kept: dict[str, list[Batch]] = {}

    def batches(self, task: str, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a task's batches: kept ones, or the loader's, which are kept if all of them fit.

        Yields:
            Pixel values `[batch, channels, height, width]` and labels `[batch]`, on the CPU.
        """
        if task in self._kept:
            yield from self._kept[task]
            return
        room = self.limit_bytes - self.used_bytes
        stored: list[Batch] = []
        size = 0
        for pixels, labels in loader:
            size += pixels.nbytes + labels.nbytes
            if size <= room:
                stored.append((pixels, labels))
            else:
                stored.clear()
            yield pixels, labels
        if size <= room:  # reached only when the caller took every batch
            self._kept[task] = stored
            self.used_bytes += size


class Score(NamedTuple):
    """Score of a task's items."""

    accuracy: float  # 0 to 1
    loss: float  # mean cross-entropy
    correct: Tensor  # bool [items], on the CPU
    labels: Tensor  # int64 [items], on the CPU


@torch.no_grad()
def score(
    classifier: nn.Module,
    batches: Iterable[Batch],
    task: str,
    to_device: Callable[[Tensor], Tensor],
) -> Score:
    """Classify a task's items; the loss is averaged over them (FusionBench averages batches).

    Raises:
        CalibrationError: If a logit is not finite, or there are no items.
    """
    correct: list[Tensor] = []
    known: list[Tensor] = []
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
        known.append(labels.cpu())
    if not correct:
        raise CalibrationError(
            f"task {task!r} has no test items. Check taskpool.tasks.{task}.data."
        )
    right = torch.cat(correct)
    return Score(right.double().mean().item(), loss_sum / len(right), right, torch.cat(known))
