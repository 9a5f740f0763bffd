"""Pictures of every mode and depth: scaled, composited on the background, or refused."""

import io
import os
from typing import Any

import numpy as np
import pytest
import torch
from fusion_bench.modelpool import BaseModelPool
from omegaconf import OmegaConf
from PIL import Image
from tiny_images import channels_first

from fusion_bench_featcal.calibration_data import calibration_batches
from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.data.pictures import fixed_content, to_rgb
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.tasks import load_images
from fusion_bench_featcal.tasks.scoring import EvaluationItems

DEEP = np.array([[0, 257 * 40, 257 * 128], [257 * 200, 65535, 257 * 3]], np.uint16)
GREY = (DEEP // 257).astype(np.uint8)
HALF = np.array([[0, 0.25], [0.5, 1]])
INK, CLEAR = (51, 102, 153), (0, 0, 0, 0)  # ink of PIL's own palette


def file_of(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def rgb(value: Any, background: tuple[int, int, int] = (255, 255, 255)) -> list:
    return np.asarray(to_rgb(value, "here", None, background)).tolist()


def grey(values: np.ndarray) -> list:
    return np.stack([values] * 3, axis=2).tolist()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_files_are_scaled(kind):
    assert rgb(file_of(Image.fromarray(DEEP), kind)) == grey(GREY)


@pytest.mark.parametrize(("mode", "order"), [("I;16", "<u2"), ("I;16B", ">u2")])
def test_16_bit_pictures_are_scaled(mode, order):
    assert rgb(Image.frombytes(mode, (3, 2), DEEP.astype(order).tobytes())) == grey(GREY)


def test_16_bit_picture_is_turned_upright():
    exif = Image.Exif()
    exif[274] = 6  # held turned
    shown = to_rgb(file_of(Image.fromarray(DEEP), "PNG", exif=exif), "here")
    assert np.asarray(shown)[..., 0].tolist() == np.rot90(GREY, -1).tolist()


@pytest.mark.parametrize(
    "value",
    [
        HALF.astype(np.float32),
        HALF,
        torch.tensor(HALF).bfloat16(),
        Image.fromarray(HALF.astype(np.float32)),
        file_of(Image.fromarray(HALF.astype(np.float32)), "TIFF"),
    ],
)
def test_floating_point_in_0_to_1_is_scaled(value):
    assert rgb(value) == grey(np.array([[0, 64], [128, 255]]))


def test_16_bit_arrays_are_scaled():
    assert rgb(DEEP) == rgb(torch.from_numpy(DEEP)) == grey(GREY)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Image.fromarray(np.full((2, 2), 70000, np.int32)), "range of int32 values is unknown"),
        (file_of(Image.fromarray(np.full((2, 2), 9, np.int32)), "TIFF"), "int32 .*8 or 16 bits"),
        (Image.fromarray(HALF.astype(np.float32) * 255), r"must be in 0\.\.1, got 0 to 255"),
        (HALF * -1, r"in 0\.\.1, got -1 to -?0"),
        (HALF * np.nan, r"in 0\.\.1, got nan"),
        (np.zeros((2, 2), np.int32), "range of int32 values is unknown"),
        (np.zeros((3, 4, 5), np.uint8), r"\[height, width\].* got uint8 \[3, 4, 5\]"),
    ],
)
def test_unknown_range(value, message):
    with pytest.raises(CalibrationError, match=f"here: .*{message}"):
        to_rgb(value, "here")


def icon() -> Image.Image:
    """Black ink beside transparency, whose hidden colour is black, too."""
    made = Image.new("RGBA", (2, 1), CLEAR)
    made.putpixel((0, 0), (*INK, 255))
    return made


def with_key(mode: str) -> Image.Image:
    made = icon().convert("RGB").convert(mode)
    made.info["transparency"] = made.getpixel((1, 0))
    return made


TRANSPARENT = {
    "RGBA": icon(),
    "file": file_of(icon(), "PNG"),
    "premultiplied": icon().convert("RGBa"),
    "palette with alpha": icon().convert("PA"),
    "array": np.asarray(icon()),
    "colour key": with_key("RGB"),
    "palette": file_of(icon().quantize(4), "PNG"),
    "palette key": file_of(with_key("P"), "GIF"),
}


@pytest.mark.parametrize("value", TRANSPARENT.values(), ids=TRANSPARENT)
def test_transparency_is_composited_on_the_background(value):
    assert rgb(value) == [[list(INK), [255] * 3]]
    assert rgb(value, (1, 2, 3)) == [[list(INK), [1, 2, 3]]]


@pytest.mark.parametrize("mode", ["LA", "La"])
def test_grey_with_alpha(mode):
    made = Image.new("LA", (2, 1), (0, 0))
    made.putpixel((0, 0), (40, 255))
    assert rgb(made.convert(mode), (1, 2, 3)) == [[[40] * 3, [1, 2, 3]]]


def test_half_transparent_pixels_are_mixed():
    assert rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 51))) == [[[204] * 3]]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "LAB"])
def test_opaque_modes_are_converted_as_pil_does(mode):
    made = Image.new("RGB", (2, 1), (204, 204, 204))
    made = Image.new("LAB", (2, 1), (60, 0, 0)) if mode == "LAB" else made.convert(mode)
    assert rgb(made) == np.asarray(made.convert("RGB")).tolist()
    if mode not in ("1", "LAB"):
        assert np.abs(np.array(rgb(made)) - 204).max() <= 2


def test_calibration_and_evaluation_see_the_same_background(tmp_path):
    icon().save(tmp_path / "icon.png")
    for background, blue in ((None, 1.0), ("black", 0.0), ("#000080", 128 / 255)):
        items = load_images(str(tmp_path), background=background)
        pool = BaseModelPool({}, train_datasets=OmegaConf.create({"a": {}}))
        pool.load_train_dataset = lambda task, items=items: items  # type: ignore[method-assign]
        (batch,) = calibration_batches(
            pool, ["a"], FeatCalSettings(samples_per_task=1), channels_first
        )["a"]
        labelled = ImageItems([{"image": items[0]["image"], "label": 0}], name="here")
        tested, _ = EvaluationItems(labelled, channels_first)[0]
        assert torch.equal(batch["pixel_values"][0], tested)
        assert batch["pixel_values"][0, 2, 0, 1].item() == pytest.approx(blue)
        again, _ = items.read(0)
        own = EvaluationItems(ImageItems(items, name="here"), channels_first)
        assert own.items.background == items.background
        assert np.asarray(to_rgb(again, "here", None, own.items.background))[0, 1, 2] == 255 * blue


def test_digest_depends_on_the_background():
    for value in (file_of(icon(), "PNG"), icon()):
        digests = {fixed_content(value, "x", None, (red, 0, 0))[1] for red in (0, 1)}
        assert len(digests) == 2


def test_no_colour():
    with pytest.raises(ValueError, match=r"background must be a colour .*got 'whit'"):
        ImageItems([], name="here", background="whit")


def test_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "one.png"
    icon().save(path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    if os.geteuid() == 0:  # who may read everything
        monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    else:
        path.chmod(0)
    with pytest.raises(CalibrationError, match=r"one\.png cannot be read \(Permission denied\)"):
        to_rgb(path, "here")


def test_folder_and_empty_file_as_image(tmp_path):
    with pytest.raises(CalibrationError, match=rf"{tmp_path} cannot be read \(Is a directory\)"):
        to_rgb(tmp_path, "here")
    (tmp_path / "one.png").touch()
    with pytest.raises(CalibrationError, match=r"image file .*one\.png is empty"):
        to_rgb(tmp_path / "one.png", "here")
    for value in (b"", {"bytes": b"", "path": None}):
        with pytest.raises(CalibrationError, match="here: image is empty"):
            to_rgb(value, "here")
