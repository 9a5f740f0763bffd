"""Pictures of any mode and depth as 8-bit RGB: grey values scaled, transparency composited."""

import logging
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor

log = logging.getLogger(__name__)

Colour = tuple[int, int, int]

WHITE: Colour = (255, 255, 255)
_TRANSPARENT_MODES = {"LA", "La", "PA", "RGBA", "RGBa"}
_TIFF_BITS, _TIFF_PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0


def parse_background(value: Any, place: str) -> Colour:
    """Read the colour that transparent pictures are composited on.

    Args:
        value: A name or code that PIL knows (`white`, `#ff8000`), or red, green and blue; None:
            white.
        place: Where it is set, for messages.

    Returns:
        Red, green and blue, 0 to 255.

    Raises:
        ValueError: If it is no colour.
    """
    if value is None:
        return WHITE
    if isinstance(value, tuple):
        return value
    try:
        return ImageColor.getrgb(value)[:3]
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{place}: background must be a colour such as white or #ff8000, got {value!r}"
        ) from error


def grey_scale(picture: Image.Image) -> tuple[int | None, bool]:
    """Tell the range of a grey picture with more than 8 bits; ask before it is transposed.

    Args:
        picture: As PIL opened it.

    Returns:
        The value of full intensity, None where it cannot be told; and whether 0 is white.
    """
    tags = getattr(picture, "tag_v2", {})
    inverted = tags.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO
    if picture.mode.startswith("I;16"):
        bits = tags.get(_TIFF_BITS, 16)  # 12-bit files open as 16-bit pictures
        return 2 ** int(bits[0] if isinstance(bits, tuple) else bits) - 1, inverted
    # releases of PIL differ in the mode that 16-bit files of these formats get
    told = picture.mode == "I" and picture.format in ("PNG", "PPM")
    return (65535 if told else None), False


def to_eight_bits(
    picture: Image.Image, scale: tuple[int | None, bool], background: Colour
) -> Image.Image:
    """Convert a picture to mode RGB.

    Args:
        picture: In any mode.
        scale: What `grey_scale` tells of it.
        background: Composited under transparent pixels.

    Returns:
        The picture in mode RGB.

    Raises:
        ValueError: If the range of its values cannot be told, or PIL cannot convert its mode.
    """
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


def array_picture(value: np.ndarray | torch.Tensor) -> Image.Image:
    """Turn an array into a picture.

    Args:
        value: `[height, width]`, `[height, width, 3]` or, with alpha, `[height, width, 4]`; uint8,
            uint16 (0 to 65535) or floating point in 0..1.

    Returns:
        The picture in mode L, RGB or RGBA.

    Raises:
        ValueError: For any other shape, dtype or range.
    """
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.is_floating_point() else value).numpy(force=True)
    if value.ndim not in (2, 3) or (value.ndim == 3 and value.shape[2] not in (3, 4)):
        raise ValueError(
            "an image array must be [height, width], [height, width, 3] or [height, width, 4], got "
            f"{value.dtype} {list(value.shape)}"
        )
    if value.dtype == np.uint16:
        value = _rescaled(value, 65535)
    elif np.issubdtype(value.dtype, np.floating):
        value = _rescaled(_checked_unit(value), 1)
    elif value.dtype != np.uint8:
        raise ValueError(
            f"an image array must be uint8, uint16 or floating point in 0..1, got {value.dtype} "
            f"{list(value.shape)}"
        )
    return Image.fromarray(np.ascontiguousarray(value))


@cache
def _log_once(message: str) -> None:
    log.info(message)


def _scaled_grey(values: np.ndarray, mode: str, full: int | None, inverted: bool) -> np.ndarray:
    if mode == "F":
        return _rescaled(_checked_unit(values), 1)
    if full is None:
        raise ValueError(
            f"its pixels are 32-bit integers (mode {mode}), whose range cannot be told: store it "
            "with 8 or 16 bits"
        )
    return _rescaled(full - values.astype(np.int64) if inverted else values, full)


def _checked_unit(values: np.ndarray) -> np.ndarray:
    if not values.size or not (values.min() >= 0 and values.max() <= 1):  # NaN fails both
        raise ValueError(
            f"its floating-point values are from {values.min():.4g} to {values.max():.4g}, and "
            "their range can be told only in 0..1: scale them to it, or store 8 or 16 bits"
        )
    return values


def _rescaled(values: np.ndarray, full: int) -> np.ndarray:
    return np.rint(values.astype(np.float64) * (255 / full)).astype(np.uint8)
