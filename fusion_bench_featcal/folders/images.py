"""Tasks of image classifiers, and of CLIP's vision towers by zero-shot heads."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion_bench_featcal.data.image_batches import TaskBatches, decode_workers
from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.loading import naming_setting
from fusion_bench_featcal.data.tables import split_of
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.folders.model_folder import ModelFolder
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import (
    LabelTests,
    Part,
    Task,
    class_logits,
    label_numbers,
    open_parts,
    sentence,
)

_COLUMNS = ("image", "label")


class ZeroShot:
    """Zero-shot heads of a whole CLIP: its text tower and its two projections."""

    def __init__(self, clip: ModelFolder) -> None:
        """Load a whole CLIP from its folder."""
        from transformers import AutoTokenizer, CLIPModel

        self._model: Any = clip.load(CLIPModel)
        self._tokenizer = AutoTokenizer.from_pretrained(clip.folder, trust_remote_code=False)

    @torch.no_grad()
    def head(self, prompts: Sequence[str]) -> Tensor:
        """Return unit vectors of the classes' prompts, `[classes, d]`."""
        tokens = self._tokenizer(list(prompts), padding=True, truncation=True, return_tensors="pt")
        pooled = self._model.text_model(**tokens).pooler_output
        return F.normalize(self._model.text_projection(pooled).float(), dim=-1)

    def logits(self, head: Tensor, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return class logits of a vision tower, which are cosines of images and prompts."""
        project = self._model.visual_projection
        pooled = model(**batch).pooler_output.cpu()
        images = F.normalize(project(pooled.to(project.weight.dtype)).float(), dim=-1)
        return float(self._model.logit_scale.exp()) * images @ head.T


def open_image_task(
    task: str, request: Request, processor: Any, heads: Sequence[str] | ZeroShot | None
) -> Task:
    """Open a task's images: a folder with a folder of images per class, a table, a hub dataset.

    Args:
        task: The task.
        request: The request.
        processor: Converts images to pixels.
        heads: Class names of the expert's head, by number, or zero-shot heads for CLIP's vision
            tower, or None.
    """
    columns = request.columns_of(task)
    refuse_unknown(columns, _COLUMNS, f"--columns {task}:")
    calibration_part, test_part = open_parts(
        task, request, partial(_items, columns=columns), spread=True
    )
    workers = decode_workers(processor)

    def batches(part: Part) -> TaskBatches:
        size = request.settings.batch_size
        return TaskBatches(task, part.rows, part.indices, size, processor, workers=workers)

    is_evaluated, notes, tests = bool(test_part.indices and heads), [], None
    if is_evaluated:
        labels, names = _labels(test_part)
        if isinstance(heads, ZeroShot):
            prompts = [request.prompt_of(task).replace("{}", name) for name in names]
            logits = partial(heads.logits, heads.head(prompts))
        else:
            numbers, notes = label_numbers(names, heads or (), test_part.option)
            labels, logits = torch.tensor(numbers)[labels], class_logits
        tests = LabelTests(batches(test_part), labels, logits)
    read = [columns.get(name, name) for name in _COLUMNS[: 1 + is_evaluated]]
    is_folder = Path(split_of(request.data[task])[0]).expanduser().is_dir()
    notes = [
        sentence(task, request, calibration_part, test_part, () if is_folder else read),
        *notes,
    ]
    return Task(batches(calibration_part), len(calibration_part.indices), 0, tests, notes)


def _labels(part: Part) -> tuple[Tensor, list[str]]:
    """Return labels of some images, and the class names by label."""
    items: ImageItems = part.rows
    if items.has_labels is False or items.classnames is None:
        raise ValueError(
            f"{part.option}: images without class names cannot be evaluated: put them into one "
            "folder per class, or give --no-eval"
        )
    return torch.tensor([items.read(index)[1] for index in part.indices]), items.classnames


def _items(location: str, split: str, option: str, *, columns: Mapping[str, str]) -> ImageItems:
    """Open images at a path, or the hub dataset `ID:SPLIT`."""
    name, named = split_of(location)
    is_here = Path(name).expanduser().exists()
    with naming_setting(option):
        keys = {f"{name}_column": column for name, column in columns.items()}
        return load_images(name, named or (None if is_here else split), **keys)
