"""Jittered copies of calibration images."""

import itertools
import math
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, run_fast
from tiny_models import clip_suite, decoder_suite, normal
from torch import Tensor

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.streams import Batch, augmentation
from fusion_bench_featcal.streams.augmentation import images_of, jittered, number_of_copies
from fusion_bench_featcal.streams.samples import take, with_copies
from fusion_bench_featcal.streams.streams import Streams

IMAGES = normal(0, 8, 2, 8, 6).float()


def spot(height: int, width: int, y: float, x: float) -> Tensor:
    """Image of a spot at a distance from the centre, in pixels."""
    rows = torch.arange(height)[:, None] - (height - 1) / 2 - y
    columns = torch.arange(width)[None] - (width - 1) / 2 - x
    return torch.exp(-(rows**2 + columns**2) / 8)[None, None]


def position(image: Tensor) -> tuple[float, float]:
    weights = image[0, 0] / image.sum()
    rows, columns = (torch.arange(n) - (n - 1) / 2 for n in weights.shape)
    return float(weights.sum(1) @ rows), float(weights.sum(0) @ columns)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 96)])
def test_images_of_any_shape_are_rotated_shifted_and_scaled(
    height: int, width: int, monkeypatch: pytest.MonkeyPatch
):
    def moved(limits: Any, y: float, x: float, *draws: float) -> tuple[float, float]:
        """Position of a spot after a change with these random numbers in [0, 1)."""
        monkeypatch.setattr(torch, "rand", lambda *_, generator: torch.tensor([draws]))
        monkeypatch.setattr(augmentation, "LIMITS", limits)
        return position(jittered(spot(height, width, y, x), [torch.Generator()]))

    for draw, angle in ((0.0, -math.radians(30)), (1.0, math.radians(30))):
        for y, x in ((0, 12), (-9, -9)):  # rotated against the map, which leads to the old image
            rotated = moved((30, 0, 0, 0), y, x, draw, 0.5, 0.5, 0.5)
            cos, sin = math.cos(angle), math.sin(angle)
            assert rotated == pytest.approx((y * cos - x * sin, y * sin + x * cos), abs=0.1)
    shifted = moved((0, 0, 0.2, 0.2), 6, 10, 0.5, 0.5, 1.0, 0.0)
    assert shifted == pytest.approx((6 + 0.1 * height, 10 - 0.1 * width), abs=0.1)
    smaller = moved((0, 0.25, 0, 0), 6, 10, 0.5, 1.0, 0.5, 0.5)
    assert smaller == pytest.approx((6 / 1.25, 10 / 1.25), abs=0.1)


def copies_of(inputs: Any = IMAGES, task: str = "a", start: int = 0, **more: Any) -> list[Any]:
    """Three copies of a batch."""
    samples = len(images_of(inputs))  # type: ignore[arg-type]
    batch = Batch(inputs, samples, start, held_out=torch.arange(samples) % 2 == 0)
    first, *copies = with_copies(task, batch, 3, FeatCalSettings(augment="jitter", **more))
    assert first is batch and all(copy.held_out is batch.held_out for copy in copies)
    return [copy.inputs for copy in copies]


def test_copies_depend_on_seed_task_position_and_number_alone():
    expected = copies_of()
    torch.manual_seed(7)
    assert all(map(torch.equal, copies_of(samples_per_task=64, batch_size=2), expected))
    different = copies_of(task="b") + copies_of(seed=1) + copies_of(start=8)
    for one, other in itertools.combinations([IMAGES, *expected, *different], 2):
        assert not torch.equal(one, other)
    parts = [
        copies_of({"pixel_values": part}, start=3 * n) for n, part in enumerate(IMAGES.split(3))
    ]
    for copy, *split in zip(expected, *parts, strict=True):
        rejoined = torch.cat([images["pixel_values"] for images in split])
        torch.testing.assert_close(rejoined, copy, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("samples", "count"), [(2, 7), (43, 5), (256, 1), (999, 1)])
def test_few_samples_get_more_copies_up_to_seven(samples: int, count: int):
    for augment in ("auto", "jitter"):
        assert number_of_copies(samples, augment, torch.zeros(1, 3, 2, 2)) == count


def test_copies_are_made_of_images_only_and_count_as_samples():
    plain, auto = (
        run_fast(decoder_suite(), **PLUS, augment=value).model for value in (None, "auto")
    )
    assert_identical(auto, plain)
    result = run_fast(clip_suite(tasks=1), **PLUS, augment="auto", samples_per_task=256)  # has 7
    assert result.log.of_kind("task")[0]["rows"] == 8 * 5 * 7
    batches = take("a", [IMAGES], FeatCalSettings(augment="jitter"), torch.nn.Linear(1, 1))
    unused: Any = None
    streams = Streams({"a": batches}, *[unused] * 5)
    assert (streams.counts("a"), streams.used("a")) == (8, 8 * len(batches)) and len(batches) > 1
