"""Images of datasets as 8-bit RGB pictures, and as the tensors that a vision model takes."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from transformers import BaseImageProcessor, ProcessorMixin

from fusion_bench_featcal.errors import CalibrationError

Processor = ProcessorMixin | BaseImageProcessor | Callable[[Any], Tensor]


def to_rgb(value: Any, item: str) -> Image.Image:
    """Convert an image of a dataset to an upright RGB picture, transparent parts on white.

    Args:
        value: A PIL image, a path, the bytes of an image file, a mapping with `bytes` or `path`
            (as `datasets` stores images), or an array or tensor of uint8, `[height, width]` or
            `[height, width, 3]` or, with alpha, `[height, width, 4]`.
        item: Name of the item in messages.

    Raises:
        CalibrationError: If it is not an image, its file is missing or damaged, or it has more than
            8 bits per channel.
    """
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        value = value.get("bytes") or value.get("path")
    name = f"{item}: image file {value}" if isinstance(value, str | Path) else f"{item}: the image"
    try:
        if isinstance(value, str | Path):
            with Image.open(Path(value).expanduser()) as opened:
                return _rgb(opened)
        if isinstance(value, bytes):
            with Image.open(io.BytesIO(value)) as opened:
                return _rgb(opened)
        if isinstance(value, np.ndarray | Tensor):
            value = Image.fromarray(np.ascontiguousarray(value))
        if isinstance(value, Image.Image):
            return _rgb(value)
    except UnidentifiedImageError as error:
        raise CalibrationError(f"{name} cannot be read: its format is unknown") from error
    # PIL raises any of these for damaged files and unsupported modes
    except (OSError, SyntaxError, ValueError, TypeError, Image.DecompressionBombError) as error:
        raise CalibrationError(f"{name} cannot be read ({error}). Repair or remove it.") from error
    raise CalibrationError(
        f"{item}: not an image but {type(value).__name__} ({str(value)[:60]!r}). Check "
        "image_column."
    )


def _rgb(picture: Image.Image) -> Image.Image:
    picture.load()
    if picture.mode.startswith(("I", "F")):
        raise ValueError(f"mode {picture.mode}: store 8 bits per channel")
    picture = ImageOps.exif_transpose(picture)
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    canvas = Image.new("RGBA", picture.size, "white")
    canvas.alpha_composite(picture.convert("RGBA"))
    return canvas.convert("RGB")


def to_pixels(image: Any, processor: Processor, item: str) -> Tensor:
    """Process one image (see `to_rgb`) to pixels `[channels, height, width]`, floating point.

    A plain callable gets arrays and tensors unchanged.

    Raises:
        CalibrationError: If the image cannot be read, or the processor fails or returns something
            else.
    """
    is_plain = not isinstance(processor, ProcessorMixin | BaseImageProcessor)
    if not (is_plain and isinstance(image, np.ndarray | Tensor)):
        image = to_rgb(image, item)
    transform: Any = processor
    try:
        pixels = (
            transform(image)
            if is_plain
            else transform(images=[image], return_tensors="pt")["pixel_values"][0]
        )
    # processors pass on any error of their image library
    except Exception as error:
        size = f"{image.width} x {image.height} " if isinstance(image, Image.Image) else ""
        raise CalibrationError(
            f"{item}: the processor fails on this {size}image ({type(error).__name__}: {error}). "
            "Remove or replace it, or change the processor."
        ) from error
    if isinstance(pixels, Tensor) and pixels.ndim == 3 and pixels.is_floating_point():
        return pixels
    got = f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, Tensor) else type(pixels)
    raise CalibrationError(
        f"{item}: the processor must return one floating-point tensor [channels, height, width] "
        f"per image, got {got}."
    )


def stack_pixels(
    images: Sequence[Tensor], name: str, setting: str, size: torch.Size | None = None
) -> Tensor:
    """Stack images of one size, `size` or that of the first one, on a new first axis.

    Raises:
        CalibrationError: If sizes differ, with both sizes.
    """
    size = size or images[0].shape
    other = next((image.shape for image in images if image.shape != size), None)
    if other is not None:
        raise CalibrationError(
            f"{name}: images have different sizes after the processor, {list(size)} and "
            f"{list(other)}. Resize and crop them to one size in {setting}."
        )
    return torch.stack(list(images))
