"""Tasks made ready for evaluation: items, class names and prompts, and their loaders."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fusion_bench_featcal.nearest_names import refuse_unknown_keys
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tasks.colours import parse_background
from fusion_bench_featcal.tasks.definition import TaskDefinition, load_task
from fusion_bench_featcal.tasks.heads import Templates, known_names, names_of, register_names
from fusion_bench_featcal.tasks.images import ImageItems
from fusion_bench_featcal.tasks.pixels import Batch, Processor, stack_pixels, to_pixels

LOADER_DEFAULTS = {"batch_size": 128, "num_workers": 0}


@dataclass(frozen=True)
class OpenTask:
    """A task with its test items, class names and prompts."""

    items: ImageItems
    classnames: list[str]
    templates: Templates


def open_task(name: str, definition: TaskDefinition, rows: Any = None) -> OpenTask:
    """Load a task's test items and make its class names known to FusionBench.

    Args:
        name: The task's name.
        definition: What the configuration says of it; all of it may be left out for a task whose
            class names FusionBench has.
        rows: The data set, where `definition.data` is None.

    Returns:
        The task, its labels checked where that needs no reading of every image.

    Raises:
        ValueError: If the definition does not fit the data, or class names clash with
            FusionBench's.
        CalibrationError: If the data cannot be read, is unlabeled or has labels out of range.
    """
    known = known_names(name)
    items = load_task(name, definition, None if known is None else known[0], rows)
    register_names(name, items.classnames or (), definition.templates)
    return OpenTask(items, *names_of(name))


def check_background(task: str, tested: Any, modelpool: Any) -> None:
    """Refuse calibration images that are composited on another colour than a task's test images.

    Args:
        task: The task's name.
        tested: Background of its test images; None: white.
        modelpool: The model pool with the calibration data.

    Raises:
        ValueError: If the two colours differ.
    """
    for split in ("train", "val", "test"):
        data = (getattr(modelpool, f"_{split}_datasets", None) or {}).get(task)
        if data is None:
            continue
        place, used = f"modelpool.{split}_datasets.{task}", background_of(data)
        if parse_background(used, place) != parse_background(tested, f"taskpool.tasks.{task}"):
            raise ValueError(
                f"{place}: transparent images are composited on {used or 'white'} here, and on "
                f"{tested or 'white'} for evaluation: set the same background here and in "
                f"taskpool.tasks.{task}"
            )


def background_of(data: Any) -> Any:
    """The key `background` of a data set's configuration, or a data set's own background."""
    return (
        data.get("background") if isinstance(data, Mapping) else getattr(data, "background", None)
    )


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
        place, root, background = self.items.at(index), self.items.root, self.items.background
        return to_pixels(image, self.processor, place, root, background), label


def evaluation_loader(items: EvaluationItems, settings: Mapping[str, Any]) -> DataLoader[Batch]:
    """A loader that gives all items in their order.

    Args:
        items: The processed items.
        settings: Arguments of `DataLoader`, as `loader_settings` returns them.

    Returns:
        Batches of pixel values `[batch, channels, height, width]` and int64 labels `[batch]`.
    """
    return DataLoader(items, collate_fn=partial(_collate, items.items.place), **settings)


def _collate(place: str, batch: Sequence[tuple[Tensor, int]]) -> Batch:
    pixels, labels = zip(*batch, strict=True)
    stacked = stack_pixels(pixels, place, "taskpool.processor")
    return stacked, torch.tensor(labels, dtype=torch.int64)


def loader_settings(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check `dataloader_kwargs` and fill in `LOADER_DEFAULTS`.

    Args:
        given: Arguments for `DataLoader`.

    Returns:
        All arguments.

    Raises:
        ValueError: For unknown arguments, and for those that would reorder or drop test items.
    """
    if isinstance(given, DictConfig):
        given = OmegaConf.to_container(given, resolve=True)  # type: ignore[assignment]
    given = dict(given or {})
    place = "taskpool.dataloader_kwargs"
    ours = {"self", "dataset", "collate_fn", "sampler", "batch_sampler"}
    valid = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in ours]
    refuse_unknown_keys(given, valid, place)
    for key in ("shuffle", "drop_last"):
        if given.get(key):
            raise ValueError(
                f"{place}.{key} must be false: test items are compared model by model, one by one."
            )
    return LOADER_DEFAULTS | given
