"""Images of datasets as upright RGB pictures, and as input tensors of vision models."""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import BaseImageProcessor, ProcessorMixin

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import user_term

MOST_PIXELS = 80_000_000
"""Maximum number of pixels of a picture. Pillow needs four bytes per pixel and copy."""
Processor = ProcessorMixin | BaseImageProcessor | Callable[[Image.Image], Tensor]


def is_transformers_processor(processor: object) -> bool:
    """Return whether a processor belongs to transformers. Others are functions of one picture."""
    return isinstance(processor, ProcessorMixin | BaseImageProcessor)


def digest_image(value: Any) -> bytes:
    """Return the SHA-256 of an image's file, or of the pixels of a PIL image."""
    value = _stored(value)
    if isinstance(value, str | Path):
        value = Path(value).expanduser().read_bytes()
    return hashlib.sha256(value.tobytes() if isinstance(value, Image.Image) else value).digest()


def _stored(value: object) -> object:
    """Return the file of a mapping as `datasets` stores it, or any other value unchanged."""
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        return value.get("bytes") or value.get("path")
    return value


def resolve_file(home: Path, value: object) -> Any:
    """Return a stored image or sound. A path becomes a `Path`, relative to the folder `home`."""
    value = _stored(value)
    return home / Path(value).expanduser() if isinstance(value, str) else value


def refuse_depth(picture: Image.Image) -> None:
    """Refuse a picture with more than 8 bits per channel, without reading its pixels."""
    if picture.mode.startswith(("I", "F")):
        raise ValueError(f"mode {picture.mode}: store it with 8 bits per channel")


def to_rgb(picture: Image.Image) -> Image.Image:
    """Return a picture upright, in RGB, with 8 bits per channel.

    Transparency is dropped, as `convert("RGB")` does in pipelines and trainers.
    """
    picture.load()
    refuse_depth(picture)
    picture = ImageOps.exif_transpose(picture)
    if picture.has_transparency_data:  # which RGB would keep as a colour that is transparent
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def read_image(value: object, item: str, read: Callable[[Image.Image], object] = to_rgb) -> Any:
    """Open an image of a dataset, and return the result of a function, by default an RGB picture.

    Args:
        value: A PIL image, a path, the bytes of an image file, or a mapping with `bytes` or `path`,
            as `datasets` stores images.
        item: Name of the item in messages.
        read: Function of the PIL image.

    Raises:
        CalibrationError: If the value is not an image, its file is missing or damaged, its header
            promises more than `MOST_PIXELS`, or the function refuses it.
    """
    value = _stored(value)
    if not isinstance(value, str | Path | bytes | Image.Image):
        raise CalibrationError(
            f"{item}: expected an image, got {type(value).__name__}. Check "
            f"{user_term('image_column')}, or "
            "store PIL images, paths or the bytes of image files"
        )
    is_file = isinstance(value, str | Path)
    try:
        if isinstance(value, Image.Image):
            return read(value)
        with Image.open(Path(value).expanduser() if is_file else io.BytesIO(value)) as opened:
            if (pixels := opened.width * opened.height) > MOST_PIXELS:
                raise ValueError(f"{pixels:,} pixels, more than {MOST_PIXELS:,}")
            return read(opened)
    except Exception as error:  # PIL raises many types for damaged files
        name = f"file {value}" if is_file else "the image"
        reason = str(error).split(" <")[0]  # without the repr of a buffer
        raise CalibrationError(
            f"{item}: {name} cannot be read as an image ({reason}). Repair, shrink or remove it"
        ) from error


def to_pixels(picture: Image.Image, processor: Processor, item: str) -> Tensor:
    """Process one RGB picture to pixels `[channels, height, width]`.

    A transformers processor whose `image_mean` is one number gets a gray picture.

    Raises:
        CalibrationError: If the processor fails.
    """
    transform: Any = processor
    try:
        if not is_transformers_processor(processor):
            return transform(picture)
        mean = getattr(getattr(transform, "image_processor", transform), "image_mean", None)
        if isinstance(mean, list | tuple) and len(mean) == 1:
            picture = picture.convert("L")
        return transform(images=[picture], return_tensors="pt")["pixel_values"][0]
    except Exception as error:  # processors pass on any error of their image library
        raise CalibrationError(
            f"{item}: the processor fails on this {picture.width} x {picture.height} image "
            f"({type(error).__name__}: {error}). Remove or replace it, or change the processor"
        ) from error


def check_channels(processor: Any, channels: object, option: str) -> None:
    """Refuse models whose images have another number of channels.

    Args:
        processor: The image processor.
        channels: `num_channels` of the models' config, or None without it.
        option: The model's name in messages.

    Raises:
        CalibrationError: If they differ. The message has both.
    """
    if channels is None or not is_transformers_processor(processor):
        return
    picture = Image.new("RGB", (64, 64))
    count = to_pixels(picture, processor, f"the image processor of {option}").shape[0]
    if count != channels:
        raise CalibrationError(
            f"{option} expects images with num_channels={channels}, but its image processor "
            f"returns {count} channels. Images are RGB, or gray if image_mean has one number: "
            "correct preprocessor_config.json"
        )


def stack_pixels(images: Sequence[Tensor], name: str) -> Tensor:
    """Stack pixels of one size on a new first axis.

    Raises:
        CalibrationError: If they are not floating-point tensors, or their sizes differ.
    """
    try:
        pixels = torch.stack(list(images))
        if not pixels.is_floating_point() or pixels.ndim != 4:
            raise TypeError(f"got {pixels.dtype} {list(pixels.shape[1:])}")
        return pixels
    except (TypeError, RuntimeError) as error:
        raise CalibrationError(
            f"{name}: the processor must return floating-point tensors [channels, height, width] "
            f"of one size: {error}"
        ) from error
