"""Pictures as data sets hold them, as 8-bit RGB, and as the tensors a vision model takes."""

import hashlib
import inspect
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError
from torch import Tensor
from transformers import BaseImageProcessor, ProcessorMixin

from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

Colour = tuple[int, int, int]
Processor = ProcessorMixin | BaseImageProcessor | Callable[[Any], Tensor]

WHITE: Colour = (255, 255, 255)
_TRANSPARENT_MODES = {"LA", "La", "PA", "RGBA", "RGBa"}
_TIFF_BITS, _TIFF_PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0


def parse_background(value: Any, place: str) -> Colour:
    """Read the colour that transparent pictures are composited on: a name or code that PIL knows.

    Raises:
        ValueError: If it is no colour.
    """
    if value is None or isinstance(value, tuple):
        return value or WHITE
    try:
        return ImageColor.getrgb(value)[:3]
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{place}: background must be a colour such as white or #ff8000, got {value!r}"
        ) from error


def to_rgb(
    value: Any, place: str, root: Path | None = None, background: Colour = WHITE
) -> Image.Image:
    """Turn an image of a data set into an RGB picture of 8 bits.

    Args:
        value: A PIL image, a path, the bytes of an image file, a mapping with `bytes` or `path`
            (as `datasets` keeps images), or an array or tensor: `[height, width]`, `[height,
            width, 3]` or, with alpha, `[height, width, 4]`, in uint8, uint16 (0 to 65535) or
            floating point in 0..1.
        place: The item, for messages.
        root: Folder that relative paths start from (None: the current one).
        background: Colour that transparent pictures are composited on.

    Returns:
        The picture in mode RGB, turned upright where the file says how it was held. Grey values of
        more than 8 bits are scaled by their file's range.

    Raises:
        CalibrationError: If it is no image, its file is missing or damaged (naming the file), or
            the range of its values cannot be told.
    """
    file = _file_of(value)
    if file is not None:
        return _open(*file, place, root, background)
    try:
        if isinstance(value, np.ndarray | Tensor):
            value = _array_picture(value)
        if isinstance(value, Image.Image):
            return _eight_bits(value, background)
    # PIL reports what it cannot convert by any of these; its images may still be unread
    except (OSError, SyntaxError, ValueError) as error:
        raise CalibrationError(f"{place}: the picture cannot be read: {error}.") from error
    raise CalibrationError(
        f"{place}: not an image but {type(value).__name__} ({str(value)[:60]!r}). Check "
        "image_column."
    )


def fixed_content(
    value: Any, place: str, root: Path | None = None, background: Colour = WHITE
) -> tuple[Any, str]:
    """A value that `to_rgb` turns into the same picture, whatever happens to files; its digest.

    No file is decoded for that.

    Raises:
        CalibrationError: As `to_rgb`.
    """
    data, path = _file_of(value) or (None, None)
    if not data and path is not None:
        try:
            data = ((root or Path()) / Path(path).expanduser()).read_bytes()
        except OSError:
            data = None  # `to_rgb` says what is wrong with the file
    if data:
        digest = hashlib.sha256(f"file on {background}\n".encode() + data)
        return {"bytes": data, "path": path}, digest.hexdigest()
    picture = to_rgb(value, place, root, background)
    digest = hashlib.sha256(f"picture {picture.size}\n".encode() + picture.tobytes())
    return picture, digest.hexdigest()


def _file_of(value: Any) -> tuple[bytes | None, str | Path | None] | None:
    """Bytes and path of an image file; None for values of another kind."""
    data, path = None, value
    if isinstance(value, bytes):
        data, path = value, None
    elif isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        path = value.get("path")
        data = value.get("bytes") or (b"" if path is None else None)
    return (data, path) if path is None or isinstance(path, str | Path) else None


def _open(
    data: bytes | None, path: str | Path | None, place: str, root: Path | None, background: Colour
) -> Image.Image:
    file = None if path is None else (root or Path()) / Path(path).expanduser()
    name = f"{place}: image" + (f" file {file}" if file is not None else "")
    try:
        content = file.read_bytes() if data is None and file is not None else data
        if not content:
            raise CalibrationError(f"{name} is empty. Repair or remove it.")
        with Image.open(io.BytesIO(content)) as opened:
            opened.load()
            return _eight_bits(opened, background)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CalibrationError(
            f"{name} does not exist (relative paths start at {root or Path.cwd()})."
        ) from error
    except PermissionError as error:
        raise CalibrationError(
            f"{name} may not be read (permission denied). Change its permissions."
        ) from error
    except IsADirectoryError as error:
        raise CalibrationError(f"{name} is a folder, not a file. Name the file.") from error
    except UnidentifiedImageError as error:
        raise CalibrationError(
            f"{name} cannot be read (no image format that PIL knows). Repair or remove it."
        ) from error
    # PIL reports damaged files by any of these
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CalibrationError(f"{name} cannot be read ({error}). Repair or remove it.") from error


def _eight_bits(opened: Image.Image, background: Colour) -> Image.Image:
    """Convert a picture of any mode to RGB, upright.

    Raises:
        ValueError: If the range of its values cannot be told, or PIL cannot convert its mode.
    """
    scale = _grey_scale(opened)  # transposing loses the file's tags
    picture = ImageOps.exif_transpose(opened)
    if picture.mode == "F" or picture.mode.startswith("I"):
        _log_once(
            "grey images of more than 8 bits are scaled to 8; FusionBench's own image task pools "
            "clip them instead"
        )
        values = np.asarray(picture)
        alpha = None
        if isinstance(key := picture.info.get("transparency"), int):
            alpha = Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))
        picture = Image.fromarray(_scaled_grey(values, picture.mode, *scale))
        if alpha is not None:
            picture.putalpha(alpha)
    palette = picture.palette.mode if picture.mode == "P" and picture.palette else "RGB"
    keyed = "transparency" in picture.info and picture.mode in ("1", "L", "P", "RGB")
    if picture.mode not in _TRANSPARENT_MODES and palette != "RGBA" and not keyed:
        return picture.convert("RGB")
    _log_once(
        f"transparent images are composited on #{bytes(background).hex()} (key background of "
        "the data); FusionBench's own image task pools drop the transparency instead"
    )
    picture = picture.convert("LA") if picture.mode == "La" else picture
    canvas = Image.new("RGBA", picture.size, (*background, 255))
    canvas.alpha_composite(picture.convert("RGBA"))
    return canvas.convert("RGB")


def _grey_scale(picture: Image.Image) -> tuple[int | None, bool]:
    """Value of full intensity of a grey picture, if it can be told; and whether 0 is white."""
    tags = getattr(picture, "tag_v2", {})
    inverted = tags.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO
    if picture.mode.startswith("I;16"):
        bits = tags.get(_TIFF_BITS, 16)  # 12-bit files open as 16-bit pictures
        return 2 ** int(bits[0] if isinstance(bits, tuple) else bits) - 1, inverted
    # releases of PIL differ in the mode that 16-bit files of these formats get
    is_16_bit = picture.mode == "I" and picture.format in ("PNG", "PPM")
    return (65535 if is_16_bit else None), False


def _array_picture(value: np.ndarray | Tensor) -> Image.Image:
    if isinstance(value, Tensor):
        value = (value.float() if value.is_floating_point() else value).numpy(force=True)
    given = f"{value.dtype} {list(value.shape)}"
    if value.ndim not in (2, 3) or (value.ndim == 3 and value.shape[2] not in (3, 4)):
        raise ValueError(
            "an image array must be [height, width], [height, width, 3] or [height, width, 4], got "
            + given
        )
    if value.dtype == np.uint16:
        value = _rescaled(value, 65535)
    elif np.issubdtype(value.dtype, np.floating):
        value = _from_unit(value)
    elif value.dtype != np.uint8:
        raise ValueError(
            f"an image array must be uint8, uint16 or floating point in 0..1, got {given}"
        )
    return Image.fromarray(np.ascontiguousarray(value))


@cache
def _log_once(message: str) -> None:
    log.info(message)


def _scaled_grey(values: np.ndarray, mode: str, full: int | None, inverted: bool) -> np.ndarray:
    if mode == "F":
        return _from_unit(values)
    if full is None:
        raise ValueError(
            f"its pixels are 32-bit integers (mode {mode}), whose range cannot be told: store it "
            "with 8 or 16 bits"
        )
    return _rescaled(full - values.astype(np.int64) if inverted else values, full)


def _from_unit(values: np.ndarray) -> np.ndarray:
    if not values.size or not (values.min() >= 0 and values.max() <= 1):  # NaN fails both
        raise ValueError(
            f"its floating-point values are from {values.min():.4g} to {values.max():.4g}, and "
            "their range can be told only in 0..1: scale them to it, or store 8 or 16 bits"
        )
    return _rescaled(values, 1)


def _rescaled(values: np.ndarray, full: int) -> np.ndarray:
    return np.rint(values.astype(np.float64) * (255 / full)).astype(np.uint8)


def to_pixels(
    image: Any,
    processor: Processor,
    place: str,
    root: Path | None = None,
    background: Colour = WHITE,
) -> Tensor:
    """Process one image (see `to_rgb`) to pixels `[channels, height, width]`, floating point.

    A plain callable gets arrays and tensors of any kind as they are.

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
    if isinstance(pixels, Tensor) and pixels.ndim == 3 and pixels.is_floating_point():
        return pixels
    got = type(pixels).__name__
    if isinstance(pixels, Tensor):
        got = f"{pixels.dtype} {list(pixels.shape)}"
    raise CalibrationError(
        f"{place}: the processor must give one floating-point tensor [channels, height, width] per "
        f"image, got {got}."
    )


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
    """Stack images of one size, `expected` or that of the first one, on a new first axis.

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
