"""Jittered copies of calibration images."""

import itertools
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, run_fast
from tiny_models import clip_suite, decoder_suite, normal
from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.streams import samples as augmentation
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.samples import with_copies


def copies_of(images: Tensor, task: str = "a", start: int = 0, seed: int = 42) -> list[Any]:
    """Three copies of a batch."""
    batch = Batch(images, len(images), start)
    first, *copies = with_copies(task, batch, 3, seed)
    assert first is batch
    return [copy.inputs for copy in copies]


def test_copies_depend_on_seed_task_position_and_number_alone():
    images = normal(0, 8, 2, 8, 6).float()
    expected = copies_of(images)
    torch.manual_seed(7)
    assert all(map(torch.equal, copies_of(images), expected))
    different = [copies_of(images, task="b"), copies_of(images, seed=1), copies_of(images, start=8)]
    for one, other in itertools.combinations([images, *sum(different, expected)], 2):
        assert not torch.equal(one, other)
    parts = [copies_of(part, start=3 * n) for n, part in enumerate(images.split(3))]
    for copy, *split in zip(expected, *parts, strict=True):
        torch.testing.assert_close(torch.cat(split), copy, rtol=0, atol=1e-5)


def test_without_changes_a_copy_is_the_image(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(augmentation, "LIMITS", (0.0, 0.0, 0.0, 0.0))
    images = normal(0, 2, 3, 8, 6)
    copies = augmentation.jittered(images, [torch.Generator(), torch.Generator()])
    torch.testing.assert_close(copies, images, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("samples", "count"), [(2, 7), (43, 5), (256, 1), (999, 1)])
def test_few_samples_get_more_copies_up_to_seven(samples: int, count: int):
    assert augmentation.number_of_copies(samples, "auto", torch.zeros(1, 3, 2, 2)) == count


def test_copies_are_made_of_images_only_and_count_as_samples():
    auto: dict[str, Any] = PLUS | {"augment": "auto", "samples_per_task": 256}
    plain: dict[str, Any] = auto | {"augment": "none"}
    models = [run_fast(decoder_suite(), **settings).model for settings in (auto, plain)]
    assert_identical(*models)
    result = run_fast(clip_suite(tasks=1), **auto)  # has 7
    assert result.log.select("task")[0]["rows"] == 8 * 5 * 7


def test_a_batch_without_images_among_those_with_is_refused():
    suite, settings = clip_suite(tasks=1), PLUS | {"augment": "auto", "samples_per_task": 8}
    first, *_ = suite.inputs["task_0"]
    suite.inputs["task_0"] = [first, {"pixel_values": first["pixel_values"].to(torch.uint8)}]
    with pytest.raises(CalibrationError, match=r"task_0.*no floating-point images.*augment=none"):
        run_fast(suite, **settings)
