"""Images of datasets as tensors: every form and mode, with any processor."""

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sample_pools import RESCALE, image_batches, rgb
from tiny_images import channels_first, picture

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.images import ImageItems

INK, PAPER, CLEAR = (51, 102, 153), (255, 255, 255), (0, 0, 0, 0)  # ink of PIL's own palette
P = picture(3)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def plain(mode: str, colour: Any) -> Image.Image:
    return Image.new(mode, (4, 4), colour)


def icon(mode: str = "RGBA") -> Image.Image:
    """Ink above transparency, whose hidden colour is black."""
    result = plain("RGBA", CLEAR)
    result.paste((*INK, 255), (0, 0, 4, 2))
    return result.convert(mode)


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(P, exif=exif)


def on_white(ink: Any = INK) -> list:
    return 2 * [4 * [ink]] + 2 * [4 * [PAPER]]


GREY = icon("LA").getpixel((0, 0))[0]  # type: ignore[index]
COLOURS = plain("RGB", "red")
COLOURS.paste("blue", (2, 0, 4, 4))
MODES: dict[str, tuple[Any, Any]] = {
    "RGB": (P, P),
    "bytes in a mapping": ({"bytes": file_of(P), "path": "inside.png"}, P),
    "bytes": (file_of(P, "BMP"), P),
    "grey": (P.convert("L"), P.convert("L").convert("RGB")),
    "black and white": (plain("1", 1), plain("RGB", PAPER)),
    "CMYK": (plain("CMYK", (0, 255, 255, 0)), plain("RGB", "red")),
    "palette of a GIF": (file_of(COLOURS, "GIF"), COLOURS),
    "palette with alpha": (file_of(icon().quantize(4)), on_white()),
    "alpha": (file_of(icon()), on_white()),
    "grey with alpha": (file_of(icon("LA")), on_white(3 * (GREY,))),
    "half transparent": (plain("RGBA", (0, 0, 0, 51)), plain("RGB", (204, 204, 204))),
    "transparent colour": (file_of(plain("RGB", 0), transparency=(0, 0, 0)), plain("RGB", PAPER)),
    "rotated": (oriented(6), P.transpose(Image.Transpose.ROTATE_270)),
    "mirrored": (oriented(2), P.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_form_of_a_picture_becomes_upright_rgb(mode):
    value, expected = MODES[mode]
    np.testing.assert_array_equal(rgb(value), np.asarray(expected))


def fail(image):
    raise ZeroDivisionError("no size")


BAD: list[tuple[Any, Any, str]] = [
    (np.zeros((2, 2, 3), np.uint8), RESCALE, "not an image but ndarray.*PIL images, paths"),
    (plain("F", 0), RESCALE, "the image cannot be read.*mode F: store 8 bits"),
    (b"GIF89a", RESCALE, r"cannot be read as an image \(cannot identify image file\)"),
    (file_of(P)[:999], RESCALE, "the image cannot be read as an image .*truncated"),
    ("no.png", RESCALE, r"file no\.png cannot be read .*No such"),
    (P, fail, r"the processor fails on this 28 x 28 image \(ZeroDivisionE.*: no size"),
    (P, lambda _: torch.zeros(2, 3, 4, 4), r"must return .*got torch.float32 \[2, 3, 4, 4\]"),
    (P, np.asarray, "must return .*expected Tensor as element 0.*got numpy"),
    (P, lambda _: torch.zeros(3, 4, 4).int(), r"must return .*got torch.int32 \[3, 4, 4\]"),
]


@pytest.mark.parametrize(("image", "processor", "message"), BAD)
def test_unusable_images_and_processors_are_named(image, processor, message):
    with pytest.raises(CalibrationError, match=f"task 'a', .*train.*: .*{message}"):
        list(image_batches([{"image": image}], processor))


@pytest.mark.parametrize("row", [{"image": P, "label": True}, (P, 1.0), [P, np.int64(1)]])
def test_rows_are_mappings_or_pairs_with_any_kind_of_number(row):
    (item,) = ImageItems([row], name="a")
    assert (item["image"].tobytes(), item["label"]) == (P.tobytes(), 1)


class Rows:
    """Pictures of their number, which record reads and the threads that read."""

    def __init__(self, folder: Path) -> None:
        self.read, self.threads, self.folder = [], set(), folder
        for number in range(50):
            Image.new("RGB", (1, 1), 3 * (number,)).save(folder / f"{number}.png")

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        self.threads.add(threading.get_ident())
        return {"image": str(self.folder / f"{index}.png")}


@pytest.mark.parametrize("processor", [RESCALE, channels_first])
def test_batches_are_read_in_order_when_they_are_due(processor, tmp_path):
    rows, numbers = Rows(tmp_path), []
    for taken, batch in enumerate(image_batches(rows, processor, batch_size=4), start=1):
        numbers += (batch["pixel_values"][:, 0, 0, 0] * 255).round().int().tolist()
        assert len(rows.read) == min(4 * taken, 50)
    assert numbers == rows.read and len(set(numbers)) == 50
    assert rows.threads == {threading.get_ident()}  # datasets need not be thread-safe
    (tmp_path / f"{rows.read[8]}.png").write_bytes(b"")
    batches = iter(image_batches(rows, processor, batch_size=4))
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(CalibrationError, match=rf"item {numbers[8]}: file .* cannot be read"):
        next(batches)
