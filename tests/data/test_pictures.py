"""Pictures of every mode: converted as PIL does, transparent ones on white, or refused."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import channels_first

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.calibration_images import TaskBatches
from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.data.pictures import to_rgb
from fusion_bench_featcal.tasks import load_images
from fusion_bench_featcal.tasks.scoring import EvaluationItems

DEEP = np.array([[0, 257 * 40], [65535, 257 * 3]], np.uint16)
INK, CLEAR = (51, 102, 153), (0, 0, 0, 0)  # ink of PIL's own palette


def file_of(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def rgb(value: Any) -> list:
    return np.asarray(to_rgb(value, "here")).tolist()


@pytest.mark.parametrize(
    "value",
    [
        DEEP,
        Image.fromarray(DEEP),
        file_of(Image.fromarray(DEEP), "PNG"),
        DEEP.astype(np.int32),
        np.zeros((2, 2), np.float32),
        np.zeros((3, 4, 5), np.uint8),
        torch.zeros(2, 2, 3),
        b"GIF89a",
    ],
)
def test_images_that_have_no_8_bits_per_channel_are_refused(value):
    with pytest.raises(CalibrationError, match="here: the image cannot be read"):
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
    "array": np.asarray(icon()),
    "colour key": with_key("RGB"),
    "palette": file_of(icon().quantize(4), "PNG"),
}


@pytest.mark.parametrize("value", TRANSPARENT.values(), ids=TRANSPARENT)
def test_transparent_parts_become_white(value):
    assert rgb(value) == [[list(INK), [255] * 3]]


def test_half_transparent_pixels_are_mixed():
    assert rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 51))) == [[[204] * 3]]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV"])
def test_opaque_modes_are_converted_as_pil_does(mode):
    made = Image.new("RGB", (2, 1), (204, 204, 204)).convert(mode)
    assert rgb(made) == np.asarray(made.convert("RGB")).tolist()


def test_calibration_and_evaluation_see_the_same_picture(tmp_path):
    (tmp_path / "icons").mkdir()
    icon().save(tmp_path / "icons" / "icon.png")
    items = load_images(str(tmp_path))
    (batch,) = TaskBatches("a", items, [0], 1, channels_first)
    tested, _ = EvaluationItems(ImageItems(items, name="here"), channels_first)[0]
    assert torch.equal(batch["pixel_values"][0], tested)
    assert tested[2].tolist() == [[pytest.approx(153 / 255), 1.0]]


def test_folder_missing_and_empty_file_as_image(tmp_path):
    (tmp_path / "empty.png").touch()
    for name, reason in (("", "Is a directory"), ("no.png", "No such"), ("empty.png", "format")):
        with pytest.raises(CalibrationError, match=rf"file {tmp_path / name} cannot be .*{reason}"):
            to_rgb(tmp_path / name, "here")
