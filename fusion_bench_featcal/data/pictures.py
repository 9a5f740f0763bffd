"""Images of data sets as 8-bit RGB pictures, and as the tensors that a vision model takes."""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError
from torch import Tensor
from transformers import BaseImageProcessor, ProcessorMixin

from fusion_bench_featcal.settings import CalibrationError

Colour = tuple[int, int, int]
Processor = ProcessorMixin | BaseImageProcessor | Callable[[Any], Tensor]

WHITE: Colour = (255, 255, 255)
_TIFF_BITS = 258


def parse_background(value: Any, setting: str) -> Colour:
    """Return a background colour from a name or code that PIL knows; None is white.

    Raises:
        ValueError: If it is no colour.
    """
    if value is None or isinstance(value, tuple):
        return value or WHITE
    try:
        return ImageColor.getrgb(value)[:3]
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{setting}: background must be a colour such as white or #ff8000, got {value!r}"
        ) from error


def to_rgb(
    value: Any, item: str, root: Path | None = None, background: Colour = WHITE
) -> Image.Image:
    """Convert an image of a data set to an 8-bit RGB picture.

    The picture is turned upright by its EXIF tag. Grey values of more than 8 bits are scaled by
    their file's range.

    Args:
        value: A PIL image, a path, the bytes of an image file, a mapping with `bytes` or `path`
            (as `datasets` stores images), or an array or tensor: `[height, width]`, `[height,
            width, 3]` or, with alpha, `[height, width, 4]`, in uint8, uint16 (0 to 65535) or
            floating point in 0..1.
        item: Name of the item in messages.
        root: Folder that relative paths start from (None: the current one).
        background: Colour behind transparent pictures.

    Raises:
        CalibrationError: If it is no image, its file is missing or damaged, or the range of its
            values is unknown.
    """
    file = _read_file(value, item, root)
    name, opened = f"{item}: the picture", value
    try:
        if file is not None:
            name, content = file
            opened = Image.open(io.BytesIO(content))
        elif isinstance(value, np.ndarray | Tensor):
            opened = _picture_of_array(value)
        if isinstance(opened, Image.Image):
            opened.load()
            return _eight_bits(opened, background)
    except UnidentifiedImageError as error:
        raise CalibrationError(
            f"{name} cannot be read (its format is unknown). Repair or remove it."
        ) from error
    # PIL reports damaged files and unsupported modes by any of these
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CalibrationError(f"{name} cannot be read ({error}). Repair or remove it.") from error
    raise CalibrationError(
        f"{item}: not an image but {type(value).__name__} ({str(value)[:60]!r}). Check "
        "image_column."
    )


def fixed_content(
    value: Any, item: str, root: Path | None = None, background: Colour = WHITE
) -> tuple[Any, str]:
    """Read an image's file without decoding it.

    Returns:
        A value that `to_rgb` converts to the same picture even if the file changes, and a digest of
        it.

    Raises:
        CalibrationError: As `to_rgb`.
    """
    file = _read_file(value, item, root)
    if file is not None:
        path = value.get("path") if isinstance(value, Mapping) else value
        value = {"bytes": file[1], "path": None if isinstance(path, bytes) else path}
        content = f"file on {background}\n".encode() + file[1]
    else:
        value = to_rgb(value, item, root, background)
        content = f"picture {value.size}\n".encode() + value.tobytes()
    return value, hashlib.sha256(content).hexdigest()


def _read_file(value: Any, item: str, root: Path | None) -> tuple[str, bytes] | None:
    """Return name and content of an image file; None for values of another kind."""
    path = None if isinstance(value, bytes) else value
    content = value if isinstance(value, bytes) else None
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        path, content = value.get("path"), value.get("bytes")
    if not isinstance(path, str | Path | None) or value is None:
        return None
    name = f"{item}: image"
    if path is not None:
        file = (root or Path()) / Path(path).expanduser()
        name = f"{name} file {file}"
        try:
            content = content or file.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CalibrationError(
                f"{name} does not exist (relative paths start at {root or Path.cwd()})."
            ) from error
        except OSError as error:
            raise CalibrationError(f"{name} cannot be read ({error.strerror}).") from error
    if not content:
        raise CalibrationError(f"{name} is empty. Repair or remove it.")
    return name, content


def _eight_bits(picture: Image.Image, background: Colour) -> Image.Image:
    """Convert a picture of any mode to RGB, upright.

    Raises:
        ValueError: If the range of its values is unknown, or PIL cannot convert its mode.
    """
    full = _full_intensity(picture)  # transposing loses the file's tags
    picture = ImageOps.exif_transpose(picture)
    if picture.mode == "F" or picture.mode.startswith("I"):
        picture = Image.fromarray(_scaled(np.asarray(picture), full))
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("LA") if picture.mode == "La" else picture
    canvas = Image.new("RGBA", picture.size, (*background, 255))
    canvas.alpha_composite(picture.convert("RGBA"))
    return canvas.convert("RGB")


def _full_intensity(picture: Image.Image) -> int | None:
    """Return the value of full intensity of a grey picture of more than 8 bits; None: unknown."""
    if picture.mode.startswith("I;16"):
        bits = getattr(picture, "tag_v2", {}).get(_TIFF_BITS, 16)  # PIL opens 12-bit files as I;16
        return 2 ** int(bits[0] if isinstance(bits, tuple) else bits) - 1
    # releases of PIL differ in the mode of 16-bit files of these formats
    return 65535 if picture.mode == "I" and picture.format in ("PNG", "PPM") else None


def _picture_of_array(array: np.ndarray | Tensor) -> Image.Image:
    if isinstance(array, Tensor):
        array = (array.float() if array.is_floating_point() else array).numpy(force=True)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise ValueError(
            "an image array must be [height, width], [height, width, 3] or [height, width, 4], got "
            f"{array.dtype} {list(array.shape)}"
        )
    if array.dtype != np.uint8:
        array = _scaled(array, 65535 if array.dtype == np.uint16 else None)
    return Image.fromarray(np.ascontiguousarray(array))


def _scaled(values: np.ndarray, full: int | None) -> np.ndarray:
    """Scale floating-point values, or integers with a known full intensity, to 8 bits."""
    if np.issubdtype(values.dtype, np.floating):
        full = 1
        if not values.size or not (values.min() >= 0 and values.max() <= 1):  # NaN fails both
            raise ValueError(
                f"floating-point values must be in 0..1, got {values.min():.4g} to "
                f"{values.max():.4g}: scale them, or store 8 or 16 bits"
            )
    if full is None:
        raise ValueError(f"the range of {values.dtype} values is unknown: store 8 or 16 bits")
    return np.rint(values.astype(np.float64) * (255 / full)).astype(np.uint8)


def to_pixels(
    image: Any,
    processor: Processor,
    item: str,
    root: Path | None = None,
    background: Colour = WHITE,
) -> Tensor:
    """Process one image (see `to_rgb`) to pixels `[channels, height, width]`, floating point.

    A plain callable gets arrays and tensors unchanged.

    Raises:
        CalibrationError: If the image cannot be read, or the processor fails or returns something
            else.
    """
    is_plain = not isinstance(processor, ProcessorMixin | BaseImageProcessor)
    if not (is_plain and isinstance(image, np.ndarray | Tensor)):
        image = to_rgb(image, item, root, background)
    transform: Any = processor
    try:
        pixels = (
            transform(image)
            if is_plain
            else transform(images=[image], return_tensors="pt")["pixel_values"][0]
        )
    # processors raise whatever their image library raises
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
