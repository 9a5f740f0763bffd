"""Tasks of image classifiers, and of CLIP's vision towers by zero-shot heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion_bench_featcal.calibration_images import TaskBatches, decode_workers
from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.loading import naming_setting
from fusion_bench_featcal.data.tables import split_of
from fusion_bench_featcal.folders.model_folder import ModelFolder
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import (
    Part,
    Score,
    Task,
    classification_score,
    label_numbers,
    open_parts,
    sentence,
)
from fusion_bench_featcal.nearest_names import refuse_unknown_keys

_COLUMNS = ("image_column", "label_column")
Head = Callable[[nn.Module, Tensor], Tensor]
"""Class logits of a model for pixels `[batch, channels, height, width]`."""


def open_image_task(
    task: str,
    request: Request,
    processor: Any,
    *,
    classes: Sequence[str] | None = None,
    clip: "ZeroShot | None" = None,
) -> Task:
    """Open a task's images: a folder with a folder of images per class, a table, a hub data set.

    Args:
        task: The task.
        request: The request.
        processor: Makes pixels.
        classes: Names of the classes of the head of the task's expert, by their numbers.
        clip: Makes heads from class names, for CLIP's vision tower.

    Raises:
        ValueError: If there are no such images, or the head lacks a class.
        CalibrationError: If the data cannot be read.
    """
    columns = {f"{name}_column": c for name, c in request.columns_of(task).items()}
    refuse_unknown_keys(columns, _COLUMNS, f"--columns {task}")
    open_items = partial(_items, columns=columns)
    used, held = open_parts(task, request, open_items, spread=True)
    workers = decode_workers(request.settings, processor)

    def batches(part: Part) -> TaskBatches:
        size = request.settings.batch_size
        return TaskBatches(task, part.rows, part.indices, size, processor, workers=workers)

    notes, tests = [sentence(task, request, used, held)], None
    if held.indices and (classes or clip):
        labels, names = _labels(held)
        if clip is not None:
            prompts = [request.prompt_of(task).replace("{}", name) for name in names]
            head: Head = partial(_by_similarity, clip.head(prompts), clip)
        else:
            numbers, guesses = label_numbers(names, classes or (), held.place)
            labels, notes = torch.tensor(numbers)[labels], [*notes, *guesses]
            head = _classify
        tests = ImageTests(batches(held), labels, head)
    return Task(batches(used), len(used.indices), 0, tests, notes)


def _labels(part: Part) -> tuple[Tensor, list[str]]:
    """Labels of some images, and the class names by label.

    Raises:
        ValueError: If there are none.
    """
    items: ImageItems = part.rows
    if items.has_labels is False or items.classnames is None:
        raise ValueError(
            f"{part.place}: images without class names cannot be evaluated: put them into one "
            "folder per class, or give --no-eval"
        )
    return torch.tensor([items.read(index)[1] for index in part.indices]), items.classnames


def _items(location: str, split: str, place: str, *, columns: dict[str, str]) -> ImageItems:
    """Open images at a path, or of a hub data set `ID:SPLIT`."""
    name, named = split_of(location)
    is_here = Path(name).expanduser().exists()
    with naming_setting(place):
        return load_images(name, named or (None if is_here else split), **columns)


def _classify(model: nn.Module, pixels: Tensor) -> Tensor:
    return model(pixel_values=pixels).logits


@dataclass(frozen=True)
class ImageTests:
    """Test images with labels, as numbers of the head's classes."""

    batches: TaskBatches
    labels: Tensor
    head: Head

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        """Score a model."""
        first = next(model.parameters())
        logits = [
            self.head(model, batch["pixel_values"].to(first.device, first.dtype)).cpu()
            for batch in self.batches
        ]
        return classification_score(torch.cat(logits), self.labels)


class ZeroShot:
    """Zero-shot heads of a whole CLIP: its text tower and its two projections.

    Attributes:
        projection: From the vision tower's output to the space that text and images share.
        scale: Factor of cosines.
    """

    def __init__(self, clip: ModelFolder) -> None:
        """Load the text tower.

        Args:
            clip: Folder of a whole CLIP.

        Raises:
            ValueError: If it cannot be loaded.
        """
        from transformers import AutoTokenizer, CLIPModel

        self._model: Any = clip.load(CLIPModel)
        self._tokenizer = AutoTokenizer.from_pretrained(clip.folder, trust_remote_code=False)
        self.projection = self._model.visual_projection
        self.scale = float(self._model.logit_scale.exp())

    @torch.no_grad()
    def head(self, prompts: Sequence[str]) -> Tensor:
        """Unit vectors of the classes' prompts, `[classes, d]`."""
        tokens = self._tokenizer(list(prompts), padding=True, truncation=True, return_tensors="pt")
        pooled = self._model.text_model(**tokens).pooler_output
        return F.normalize(self._model.text_projection(pooled).float(), dim=-1)


def _by_similarity(head: Tensor, clip: ZeroShot, model: nn.Module, pixels: Tensor) -> Tensor:
    pooled = model(pixel_values=pixels).pooler_output.cpu()
    images = clip.projection(pooled.to(clip.projection.weight.dtype)).float()
    return clip.scale * F.normalize(images, dim=-1) @ head.T
