"""Tasks of image classifiers, and of CLIP's vision towers by zero-shot heads."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion_bench_featcal.data.batch_sizes import batch_size_of
from fusion_bench_featcal.data.image_batches import ImageBatches
from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.loading import unloadable
from fusion_bench_featcal.data.scoring import class_tests, own_logits
from fusion_bench_featcal.data.tables import split_location
from fusion_bench_featcal.data.text_limits import longest_text, positions_of
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.folders.model_folder import ModelFolder
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import (
    Subset,
    Task,
    TaskData,
    head_class_indices,
    not_scored,
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
        most, _ = longest_text(self._tokenizer, positions_of(self._model.text_model))
        cut: Any = {"truncation": True, "max_length": most}
        tokens = self._tokenizer(list(prompts), padding=True, **cut, return_tensors="pt")
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
        heads: Class names of the expert's head, by class index, or zero-shot heads for CLIP's
            vision tower, or None.
    """
    columns, reason, note, scorer = request.columns_of(task), None, None, None
    if heads and not isinstance(heads, ZeroShot) and (reason := not_scored([], heads)):
        heads = None
    refuse_unknown(columns, _COLUMNS, f"--columns {task}:")
    read_columns = columns if heads else {**columns, "label": None}  # calibration reads no labels
    data = TaskData.open(task, request, partial(_open_images, columns=read_columns))
    data = data.unscored(reason) if reason else data
    for subset in (data.samples, data.tests):
        subset.dataset.check(subset.indices)
    digests = (map(subset.dataset.digest, subset.indices) for subset in (data.samples, data.tests))
    data, _ = data.without_repeats(*digests)
    size = batch_size_of(request.settings.batch_size, request.device)
    if data.tests.indices and heads:
        labels, logits, note = _read_labels(data.tests, heads, request.prompt_of(task))
        images = ImageBatches(data.tests.dataset, data.tests.indices, size, processor)
        scorer = class_tests(lambda _: images, size, labels, logits)
    read = [columns.get(name, name) for name in _COLUMNS[: 1 if scorer is None else 2]]
    is_folder = Path(split_location(request.data[task])[0]).expanduser().is_dir()
    batches = ImageBatches(data.samples.dataset, data.samples.indices, size, processor)
    return data.opened(batches, scorer, () if is_folder else read, [*filter(None, [note])])


def _read_labels(
    subset: Subset, heads: Sequence[str] | ZeroShot, prompt: str
) -> tuple[list[int], Any, str | None]:
    """Return the head's labels of some images, a function for its logits, and a note or None."""
    items: ImageItems = subset.dataset
    labels: list[Any] = [items.read(index)[1] for index in subset.indices]
    if None in labels:
        raise ValueError(
            f"{subset.option}: images without labels cannot be evaluated. Put them into one folder "
            "per class, name the label column (--columns label=NAME), or give --no-eval"
        )
    names = items.classnames
    if not isinstance(heads, ZeroShot):
        values = labels if names is None else [names[label] for label in labels]
        class_indices, note = head_class_indices(
            values,
            names,
            heads,
            lambda n: f"{subset.option}, example {subset.indices[n]}",
            more_labels=items.labels if names is None else names,
        )
        return class_indices, own_logits, note
    if names is None:
        raise ValueError(
            f"{subset.option}: zero-shot heads need class names, but the labels are numbers. Put "
            "the images into one folder per class, or give --no-eval"
        )
    prompts = [prompt.replace("{}", name) for name in names]
    return labels, partial(heads.logits, heads.head(prompts)), None


def _open_images(
    location: str, split: str, option: str, *, columns: Mapping[str, str | None]
) -> ImageItems:
    """Open images at a path or on the hub, with or without `:SPLIT`."""
    with error_context(option, cause=unloadable):
        keys: Any = {f"{name}_column": column for name, column in columns.items()}
        return load_images(location, usual_split=split, **keys)
