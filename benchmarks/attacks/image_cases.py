"""Attacks by pictures: their modes, transparency and sizes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_images import picture
from transformers import CLIPProcessor

from attacks.files import tiny_clips
from attacks.judging import REFUSED, RIGHT, case, expect
from attacks.worlds import World, expect_finite
from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.calibration_data import calibration_batches
from fusion_bench_featcal.tasks import load_images

_RAMP = np.linspace(0, 1, 64).reshape(8, 8)


def _numbers(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


class OneRow:
    """A pool with one training sample."""

    train_dataset_names = ("t",)

    def __init__(self, row: Any) -> None:
        """Take the sample."""
        self._row = row

    def load_train_dataset(self, task: str) -> Any:
        """The sample, in a list."""
        return [self._row]


def drawn(row: Any, processor: Any) -> torch.Tensor:
    """Pixels `[channels, height, width]` that a calibration draws from one sample."""
    settings = FeatCalSettings(samples_per_task=1, decode_workers=0)
    batches = calibration_batches(OneRow(row), ["t"], settings, processor)["t"]
    return next(iter(batches))["pixel_values"][0]


def seen(image: Any, folder: Path, suffix: str | None = ".png") -> np.ndarray:
    """The RGB picture `[height, width, 3]` that a model would see, from a file and from memory.

    Without a suffix, from memory alone: there are modes that no file holds.
    """
    pixels = drawn({"image": image}, _numbers)
    from_memory = pixels.permute(1, 2, 0).numpy().astype(int)
    if suffix is None:
        return from_memory
    (folder / "data" / "only").mkdir(parents=True)
    image.save(folder / "data" / "only" / f"shot{suffix}")
    from_file = np.array(load_images(str(folder / "data"))[0]["image"]).astype(int)
    expect(np.abs(from_file - from_memory).max() <= 1, "differs from a file and from memory")
    return from_file


def expect_grey(found: np.ndarray, wanted: np.ndarray) -> None:
    """Compare with grey values in 0..1."""
    gap = np.abs(found - 255 * wanted[:, :, None]).max()
    expect(gap <= 1, f"off by up to {gap:.0f} of 255; seen values {np.unique(found)[:4]}...")


def _grey(
    name: str, values: np.ndarray, wanted: np.ndarray | None, suffix: str, **more: Any
) -> None:
    """Register a case: pixel values of some mode, and what they are in 0..1 (None: unknown)."""

    def run(folder: Path) -> None:
        found = seen(Image.fromarray(values), folder, suffix)
        if wanted is not None:
            expect_grey(found, wanted)

    case(f"images: {name}", "shot|item 0", **more)(run)


_grey("16-bit grey, png", np.round(65535 * _RAMP).astype(np.uint16), _RAMP, ".png", must=RIGHT)
_grey("16-bit grey, tiff", np.round(65535 * _RAMP).astype(np.uint16), _RAMP, ".tiff", must=RIGHT)
_grey("32-bit grey, all of its range", np.round((2**31 - 1) * _RAMP).astype(np.int32),
      _RAMP, ".tiff")  # fmt: skip
_grey("32-bit grey that holds 16-bit values", np.round(65535 * _RAMP).astype(np.int32),
      _RAMP, ".tiff")  # fmt: skip
_grey("32-bit grey, negative values", (1000 * _RAMP - 500).astype(np.int32), None, ".tiff",
      must=REFUSED)  # fmt: skip
_grey("float grey from 0 to 1", _RAMP.astype(np.float32), _RAMP, ".tiff")
_grey("float grey from -3 to 7", (10 * _RAMP - 3).astype(np.float32), None, ".tiff", must=REFUSED)
_grey("float grey with NaN", np.where(_RAMP > 0.9, np.nan, _RAMP).astype(np.float32), None,
      ".tiff", must=REFUSED)  # fmt: skip
_grey("8-bit grey", np.round(255 * _RAMP).astype(np.uint8), _RAMP, ".png", must=RIGHT)
_grey("1-bit", _RAMP > 0.5, (_RAMP > 0.5).astype(float), ".png", must=RIGHT)


def _icon() -> Image.Image:
    """Black, of all opacities: nothing of it is seen without its alpha."""
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[..., 3] = np.round(255 * _RAMP)
    return Image.fromarray(pixels)


def _with_transparent_colour(mode: str) -> Image.Image:
    """A dark picture of which one colour counts as transparent."""
    image = Image.new(mode, (8, 8), 10 if mode == "L" else (10, 10, 10))
    image.paste(0 if mode == "L" else (0, 0, 0), (0, 0, 4, 4))
    image.info["transparency"] = 0 if mode == "L" else (0, 0, 0)
    return image


def _palette() -> Image.Image:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 10, 10] + [0] * 762)
    image.paste(0, (0, 0, 4, 4))
    image.info["transparency"] = 0
    return image


_TRANSPARENT: Mapping[str, Callable[[], Image.Image]] = {
    "RGBA icon": _icon,
    "grey with alpha": lambda: _icon().convert("LA"),
    "premultiplied alpha": lambda: _icon().convert("RGBa"),
    "palette": _palette,
    "transparent colour in RGB": lambda: _with_transparent_colour("RGB"),
    "transparent grey": lambda: _with_transparent_colour("L"),
}


def _transparent(name: str, make: Callable[[], Image.Image]) -> None:
    def run(folder: Path) -> None:
        image = make()
        premultiplied = image.mode == "RGBa"
        whole = np.array(_icon() if premultiplied else image.convert("RGBA")).astype(float)
        found = seen(image, folder, None if premultiplied else ".png")
        alpha = whole[..., 3:] / 255
        background = seen(_icon(), folder / "again", None)[0, 0]
        wanted = alpha * whole[..., :3] + (1 - alpha) * background
        gap = np.abs(found - wanted).max()
        expect(background.any(), "a black icon on black: the picture is lost")
        expect(gap <= 2, f"no composition on {background}: off by up to {gap:.0f}")

    case(f"images: {name} is composed on a background", "shot|item 0")(run)


for _name, _make in _TRANSPARENT.items():
    _transparent(_name, _make)


@case("images: modes that PIL converts rightly", must=RIGHT)
def _(folder: Path) -> None:
    for mode, suffix in {"RGB": ".png", "CMYK": ".tiff", "YCbCr": ".tiff"}.items():
        image = picture(1, (8, 8)).convert(mode)
        wanted = np.array(image.convert("RGB")).astype(int)
        found = seen(image, folder / mode, suffix)
        expect(np.abs(found - wanted).max() <= 1, f"{mode} differs")


@case("images: held sideways, from a file and from memory", must=RIGHT)
def _(folder: Path) -> None:
    sideways = Image.Exif()
    sideways[0x0112] = 6  # to be turned by a quarter
    picture(1, (6, 8)).save(folder / "shot.png", exif=sideways)
    with Image.open(folder / "shot.png") as image:
        found = seen(image, folder, None)
    wanted = np.rot90(np.array(picture(1, (6, 8))), -1).astype(int)
    expect(found.shape == wanted.shape and (found == wanted).all(), "not turned from memory")


@case("images: 16-bit grey of the other byte order", must=RIGHT)
def _(folder: Path) -> None:
    data = np.round(65535 * _RAMP).astype(">u2").tobytes()
    expect_grey(seen(Image.frombytes("I;16B", (8, 8), data), folder, None), _RAMP)


_ARRAYS: Mapping[str, np.ndarray] = {
    "float": _RAMP.astype(np.float32),
    "16-bit": np.round(65535 * _RAMP).astype(np.uint16),
    "8-bit with alpha": np.array(picture(2, (8, 8)).convert("RGBA")),
}
for _name, _values in _ARRAYS.items():

    @case(f"images: {_name} array", "item 0")
    def _(folder: Path, values: np.ndarray = _values) -> None:
        # A plain callable gets arrays as they are, a transformers processor pictures.
        processor = CLIPProcessor.from_pretrained(tiny_clips()["_pretrained_"])
        plain = np.round(255 * _RAMP).astype(np.uint8) if values.ndim == 2 else values[..., :3]
        wanted = drawn({"image": Image.fromarray(plain).convert("RGB")}, processor)
        gap = (drawn({"image": values}, processor) - wanted).abs().max().item()
        expect(gap < 0.03, f"off by {gap:.2f} from the 8-bit picture")


for _size in ((1, 1), (4000, 1), (1, 4000), (2, 1)):

    @case(f"images: one of {_size[0]}x{_size[1]} among good ones, calibration", "one", r"\.png")
    def _(folder: Path, size: tuple[int, int] = _size) -> None:
        world = World(folder)
        picture(1, size).save(next(world.data("one", "train").rglob("*.png")))
        expect_finite(world.run(samples_per_task=12))

    @case(f"images: one of {_size[0]}x{_size[1]} among good ones, evaluation", "one", r"\.png")
    def _(folder: Path, size: tuple[int, int] = _size) -> None:
        world = World(folder)
        picture(1, size).save(next(world.data("one", "test").rglob("*.png")))
        world.command().succeeded()
