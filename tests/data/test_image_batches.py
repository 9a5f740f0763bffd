"""Images of datasets as tensors: every form and mode, by any processor, in threads or not."""

import io
import os
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sample_pools import RESCALE, Pool, image_batches, rgb
from tiny_images import channels_first, picture

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.image_batches import decode_workers
from fusion_bench_featcal.fusionbench import data as calibration_data
from fusion_bench_featcal.fusionbench.data import open_labelled

INK, CLEAR = (51, 102, 153), (0, 0, 0, 0)  # ink of PIL's own palette


def file_of(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def icon() -> Image.Image:
    """Ink above transparency, whose hidden colour is black."""
    result = Image.new("RGBA", (4, 4), CLEAR)
    result.paste((*INK, 255), (0, 0, 4, 2))
    return result


P = picture(3)
PIXELS = np.asarray(P)
ON_WHITE = 2 * [4 * [INK]] + 2 * [4 * [(255, 255, 255)]]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (P, PIXELS),
        ({"bytes": file_of(P), "path": "inside.png"}, PIXELS),
        (PIXELS, PIXELS),
        (torch.from_numpy(np.array(P)), PIXELS),
        *((P.convert(mode), np.asarray(P.convert(mode).convert("RGB"))) for mode in ("L", "CMYK")),
        (file_of(icon()), ON_WHITE),
        (np.asarray(icon()), ON_WHITE),
        (file_of(icon().quantize(4)), ON_WHITE),
        (Image.new("RGBA", (4, 4), (0, 0, 0, 51)), np.full((4, 4, 3), 204)),  # mixed with white
    ],
)
def test_every_form_of_a_picture_becomes_rgb(value, expected):
    np.testing.assert_array_equal(rgb(value), expected)


def fail(image):
    raise ZeroDivisionError("no size")


@pytest.mark.parametrize(
    ("image", "processor", "message"),
    [
        (np.array([[0, 65535]], np.uint16), RESCALE, "the image cannot be read"),
        (np.zeros((2, 2), np.float32), RESCALE, "the image cannot be read"),
        (b"GIF89a", RESCALE, "the image cannot be read: its format is unknown"),
        ("no.png", RESCALE, r"image file no\.png cannot be read .*No such"),
        (P, fail, r"the processor fails on this 28 x 28 image \(ZeroDivisionE.*: no size"),
        (P, lambda _: torch.zeros(2, 3, 4, 4), r"must return .*got torch.float32 \[2, 3, 4, 4\]"),
    ],
)
def test_images_and_processors_that_do_not_fit_are_named(image, processor, message):
    with pytest.raises(CalibrationError, match=f"task 'a', .*train.*, item 0: .*{message}"):
        list(image_batches([{"image": image}], processor))


@pytest.mark.parametrize("row", [{"image": P, "label": True}, (P, 1.0), (P, torch.tensor(1))])
def test_any_map_style_data_set(row):
    (item,) = open_labelled(Pool(a=[row]), "a", "train")
    assert (item["image"].tobytes(), item["label"]) == (P.tobytes(), 1)
    (batch,) = image_batches([row], channels_first)
    assert torch.equal(batch["pixel_values"][0], channels_first(P))


class Rows:
    """Fifty arrays with their number in every pixel. Records reads and the threads that read."""

    def __init__(self) -> None:
        self.read, self.threads = [], set()

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        self.threads.add(threading.get_ident())
        return np.full((1, 1, 3), index, np.uint8)


def pixels(array: np.ndarray) -> torch.Tensor:
    time.sleep(int(array[0, 0, 0]) % 3 / 1000)  # later items are often ready first
    return torch.from_numpy(array).permute(2, 0, 1).float()


@pytest.mark.parametrize("workers", [0, 3])
def test_threads_keep_the_order_and_read_at_most_a_batch_ahead(workers, monkeypatch):
    monkeypatch.setattr(calibration_data, "decode_workers", lambda _: workers)
    rows, numbers = Rows(), []
    batches = image_batches(rows, pixels, batch_size=4)
    for taken, batch in enumerate(batches, start=1):
        numbers += batch["pixel_values"][:, 0, 0, 0].tolist()
        assert len(rows.read) <= 4 * taken + max(4, 2 * workers) + 1
    assert numbers == rows.read and len(numbers) == 50
    assert rows.threads == {threading.get_ident()}


def test_error_comes_when_its_image_is_due_and_ends_the_threads(monkeypatch):
    monkeypatch.setattr(calibration_data, "decode_workers", lambda _: 2)

    def fails(array: np.ndarray) -> torch.Tensor:
        if array[0, 0, 0] in rows.read[9:12:2]:
            raise OSError(f"number {array[0, 0, 0]}")
        return pixels(array)

    rows = Rows()
    batches = iter(image_batches(rows, fails, batch_size=4))
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(RuntimeError) as error:
        next(batches)
    number = rows.read[9]
    assert re.search(f"item {number}: .*number {number}", str(error.value))
    assert not [t for t in threading.enumerate() if t.name.startswith("featcal-images")]


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 2), (64, 8)])
def test_automatic_number_is_one_per_core_up_to_eight(monkeypatch, cores, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert decode_workers(RESCALE) == workers
    assert decode_workers(pixels) == 0  # it may not be safe in threads
