"""From pictures to the tensors a CLIP vision model takes."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import BaseImageProcessor, ProcessorMixin

from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tasks.colours import WHITE, Colour
from fusion_bench_featcal.tasks.images import to_rgb

Processor = ProcessorMixin | BaseImageProcessor | Callable[[Any], Tensor]
Batch = tuple[Tensor, Tensor]


def to_pixels(
    image: Any,
    processor: Processor,
    place: str,
    root: Path | None = None,
    background: Colour = WHITE,
) -> Tensor:
    """Process one image, exactly as for evaluation.

    Args:
        image: Anything `to_rgb` takes; for a plain callable also an array or tensor of any kind,
            which it gets as it is.
        processor: A transformers processor, or a callable from a picture to a tensor.
        place: The item, for messages.
        root: Folder that relative paths start from.
        background: Colour that transparent pictures are composited on.

    Returns:
        Pixel values `[channels, height, width]`, floating point.

    Raises:
        CalibrationError: If the image cannot be read, or the processor fails on it or gives
            something else.
    """
    is_plain = not isinstance(processor, ProcessorMixin | BaseImageProcessor)
    given: Any = image
    if not (is_plain and isinstance(image, np.ndarray | Tensor)):
        given = to_rgb(image, place, root, background)
    try:
        pixels = processor(given) if is_plain else _prepared(processor, given)
    # processors raise whatever their image library raises
    except Exception as error:
        shown = "it"
        if isinstance(given, Image.Image):
            shown = f"a picture {given.width} pixels wide and {given.height} high"
        raise CalibrationError(
            f"{place}: the processor cannot prepare {shown} ({type(error).__name__}: {error}). "
            "Remove or replace it, or change the processor."
        ) from error
    if not isinstance(pixels, Tensor) or pixels.ndim != 3 or not pixels.is_floating_point():
        got = (
            f"{pixels.dtype} {list(pixels.shape)}"
            if isinstance(pixels, Tensor)
            else type(pixels).__name__
        )
        raise CalibrationError(
            f"{place}: the processor must give one floating-point tensor [channels, height, "
            f"width] per image, got {got}."
        )
    return pixels


def _prepared(processor: Any, picture: Image.Image) -> Any:
    """One picture through a transformers processor, as it comes out."""
    images = getattr(processor, "image_processor", processor)
    edge = dict(getattr(images, "size", None) or {}).get("shortest_edge")
    if edge and Image.MAX_IMAGE_PIXELS is not None:
        enlarged = edge * edge * max(picture.size) // min(picture.size)
        if enlarged > 2 * Image.MAX_IMAGE_PIXELS:  # PIL's own limit for files
            raise ValueError(f"it would be enlarged to {enlarged} pixels before it is cropped")
    options = {}
    # Processors that compute in numpy take 1 or 3 rows of pixels for channels unless told.
    if "input_data_format" in inspect.signature(images.preprocess).parameters:
        options["input_data_format"] = "channels_last"
    return processor(images=[picture], return_tensors="pt", **options)["pixel_values"][0]


def stack_pixels(
    pixels: Sequence[Tensor], place: str, setting: str, expected: torch.Size | None = None
) -> Tensor:
    """Stack images of one size.

    Args:
        pixels: Tensors `[channels, height, width]`.
        place: The data they come from, for messages.
        setting: The setting that names the processor, for messages.
        expected: The size of earlier images (None: that of the first one).

    Returns:
        One tensor `[len(pixels), channels, height, width]`.

    Raises:
        CalibrationError: If sizes differ, with both sizes.
    """
    expected = expected or pixels[0].shape
    other = next((image.shape for image in pixels if image.shape != expected), None)
    if other is not None:
        raise CalibrationError(
            f"{place}: images have different sizes after the processor, {list(expected)} and "
            f"{list(other)}. Resize and crop them to one size in {setting}."
        )
    return torch.stack(list(pixels))


class PixelCache:
    """Keeps processed batches of several tasks up to a memory limit.

    Attributes:
        limit_bytes: The limit.
        used_bytes: What is kept at the moment.
    """

    def __init__(self, limit_mb: float) -> None:
        self.limit_bytes = int(limit_mb * 2**20)
        self.used_bytes = 0
        self._kept: dict[str, list[Batch]] = {}

    def batches(self, task: str, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a task's batches: kept ones, or the loader's, which are kept if all of them fit.

        Args:
            task: The task they belong to.
            loader: Gives the same batches each time.

        Yields:
            Pixel values `[batch, channels, height, width]` and labels `[batch]`, on the CPU.
        """
        if task in self._kept:
            yield from self._kept[task]
            return
        room = self.limit_bytes - self.used_bytes
        kept: list[Batch] = []
        size = 0
        for pixels, labels in loader:
            size += pixels.nbytes + labels.nbytes
            if size <= room:
                kept.append((pixels, labels))
            else:
                kept.clear()
            yield pixels, labels
        if size <= room:  # reached only when the caller took every batch
            self._kept[task] = kept
            self.used_bytes += size
