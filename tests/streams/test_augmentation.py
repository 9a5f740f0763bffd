"""Jittered copies of calibration samples."""

import itertools
import math
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, run_fast
from tiny_models import Suite, clip_suite, decoder_suite, normal
from torch import Tensor

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.streams import Batch, augmentation
from fusion_bench_featcal.streams.augmentation import images_of, jittered, number_of_copies
from fusion_bench_featcal.streams.samples import take, with_copies
from fusion_bench_featcal.streams.streams import Streams

IMAGES = normal(0, 8, 2, 8, 6).float()


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(number) for number in range(count)]


def copies_of(inputs: Any = IMAGES, task: str = "a", start: int = 0, **more: Any) -> list[Any]:
    """Three copies of a batch, whose samples are held out like those that they are of."""
    settings = FeatCalSettings(augment="jitter", **more)
    images = images_of(inputs)
    assert images is not None
    held_out = torch.arange(len(images)) % 2 == 0
    batch = Batch(inputs, len(images), start, held_out=held_out)
    first, *copies = with_copies(task, batch, 3, settings)
    assert first is batch
    assert [(c.samples, c.start, c.copy) for c in copies] == [
        (len(images), start, n) for n in (1, 2, 3)
    ]
    assert all(copy.held_out is held_out for copy in copies)
    return [copy.inputs for copy in copies]


def test_images_change_a_little_and_each_in_its_own_way():
    steep = torch.linspace(-1, 1, 64).expand(4, 1, 64, 64)
    result = jittered(steep, generators(4))
    change = (result - steep).abs()
    # 8 % of a side, and what a turn by 8 degrees and 8 % of size move at its ends
    assert change.mean() > 0.02 and change.max() < 2 * 0.08 + math.sin(math.radians(8)) + 0.1
    for number in range(3):
        assert (result[number] - result[number + 1]).abs().mean() > 0.01
    assert result.min() >= steep.min() and result.max() <= steep.max()  # borders are repeated


def disc(height: int, width: int, y: float, x: float) -> Tensor:
    """A spot at a place that is given from the middle, in pixels."""
    rows = torch.arange(height)[:, None] - (height - 1) / 2 - y
    columns = torch.arange(width)[None] - (width - 1) / 2 - x
    return torch.exp(-(rows**2 + columns**2) / 8)[None, None]


def place_of(image: Tensor) -> tuple[float, float]:
    """Its spot's place."""
    weights = image[0, 0] / image.sum()
    height, width = weights.shape
    rows, columns = torch.arange(height) - (height - 1) / 2, torch.arange(width) - (width - 1) / 2
    return float(weights.sum(1) @ rows), float(weights.sum(0) @ columns)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 96)])
def test_spots_turn_and_move_by_the_settings_whatever_the_shape(
    height: int, width: int, monkeypatch: pytest.MonkeyPatch
):
    def moved(limits: Any, spot: Tensor, *draws: float) -> tuple[float, float]:
        """The place of a spot if every image gets these random numbers in [0, 1)."""
        monkeypatch.setattr(torch, "rand", lambda *_, generator: torch.tensor([draws]))
        monkeypatch.setattr(augmentation, "LIMITS", limits)
        return place_of(jittered(spot, generators(1)))

    for draw, angle in ((0.0, -math.radians(30)), (1.0, math.radians(30))):
        for y, x in ((0, 12), (-9, -9)):
            turned = moved((30, 0, 0, 0), disc(height, width, y, x), draw, 0.5, 0.5, 0.5)
            # the map leads from the new image to the old one: the spot turns the other way
            turned_y = y * math.cos(angle) - x * math.sin(angle)
            turned_x = y * math.sin(angle) + x * math.cos(angle)
            assert turned == pytest.approx((turned_y, turned_x), abs=0.1)
    spot = disc(height, width, 6, 10)
    shifted = moved((0, 0, 0.2, 0.2), spot, 0.5, 0.5, 1.0, 0.0)
    assert shifted == pytest.approx((6 + 0.1 * height, 10 - 0.1 * width), abs=0.1)
    smaller = moved((0, 0.25, 0, 0), spot, 0.5, 1.0, 0.5, 0.5)
    assert smaller == pytest.approx((6 / 1.25, 10 / 1.25), abs=0.1)


def test_copies_depend_on_seed_task_place_and_number_alone():
    expected = copies_of()
    assert len(expected) == 3
    torch.manual_seed(7)
    assert all(map(torch.equal, copies_of(samples_per_task=64, batch_size=2), expected))
    different = copies_of(task="b") + copies_of(seed=1) + copies_of(start=8)
    for one, other in itertools.combinations([IMAGES, *expected, *different], 2):
        assert not torch.equal(one, other)
    by_threes = [
        copies_of({"pixel_values": images}, start=3 * number)
        for number, images in enumerate(IMAGES.split(3))
    ]
    for copy, *split in zip(expected, *by_threes, strict=True):  # batches do not count
        rejoined = torch.cat([images["pixel_values"] for images in split])
        torch.testing.assert_close(rejoined, copy, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("samples", "count"), [(2, 7), (43, 5), (256, 1), (999, 1)])
def test_copies_bring_the_images_that_there_are_to_256(samples: int, count: int):
    for augment in ("auto", "jitter"):
        assert number_of_copies(samples, augment, torch.zeros(1, 3, 2, 2)) == count


def test_copies_count_as_samples_where_weights_are_weighed_but_not_in_the_log():
    batches = take("a", [IMAGES], FeatCalSettings(augment="jitter"), torch.nn.Linear(1, 1))
    unused: Any = None
    streams = Streams({"a": batches}, *[unused] * 5)
    assert (streams.counts("a"), streams.used("a")) == (8, 8 * len(batches)) and len(batches) > 1


def run(suite: Suite, **more: Any) -> Any:
    return run_fast(suite, **(PLUS | more))


def test_calibration_sees_the_copies_of_images_only():
    plain, auto = (run(decoder_suite(), augment=value).model for value in (None, "auto"))
    assert_identical(auto, plain)
    result = run(clip_suite(tasks=1), augment="auto", samples_per_task=256)  # of which there are 7
    assert result.log.of_kind("task")[0]["rows"] == 8 * 5 * 7
