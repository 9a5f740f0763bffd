"""Whisper and vision-language models: what their inputs must have, and which rows count."""

from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, assert_same, run_fast, run_slow
from model_types import ROWS
from tiny_models import (
    VISION_LANGUAGE_REPLAY,
    WHISPER_REPLAY,
    Suite,
    clip_model,
    vision_language_batch,
    vision_language_model,
    whisper_batch,
)

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import VISION_LANGUAGE, WHISPER

KINDS: dict[str, Any] = {"whisper": WHISPER_REPLAY, "qwen2_vl": VISION_LANGUAGE_REPLAY}


def suite_of(kind: str) -> Suite:
    suite = next(row for row in ROWS if row.name == kind).suite()
    assert suite is not None
    return suite


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [PLUS, {"held_out": 1}], ids=["plus", "held out"])
def test_other_calibrations_equal_replay(kind: str, more: dict[str, Any]):
    suite = suite_of(kind)
    if kind == "qwen2_vl" and "held_out" in more:  # images of several samples are in one list
        for task, batches in suite.inputs.items():
            suite.inputs[task] = [vision_language_batch([n], n) for n in range(3, 3 + len(batches))]
    found = run_fast(suite, **more)
    assert_identical(found.model, run_fast(suite, family=KINDS[kind], **more).model)


def test_parts_of_families_are_looked_for():
    for family in (WHISPER, VISION_LANGUAGE):
        with pytest.raises(CalibrationError, match=r"CLIPVisionModel has no .*replay, blocks"):
            family.stages(clip_model())


def test_positions_of_whisper_that_count():
    batch = whisper_batch([4, 1], seed=0) | {"attention_mask": torch.ones(2, 12)}
    assert WHISPER.row_weights(batch, 0, "all") is None
    rows = WHISPER.row_weights(batch, 1, "all")
    assert rows is not None and rows.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert WHISPER.other_rows(batch, 0) == {}
    assert set(WHISPER.other_rows(batch, 1).values()) == {None}


def test_images_are_needed_and_batches_of_several_are_not_cut():
    batch, model = vision_language_batch([4, 2], seed=0), vision_language_model()
    (first, *_), _ = VISION_LANGUAGE.stages(model)
    text = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with pytest.raises(
        CalibrationError, match=r"pixel_values .* they are \['attention_mask', 'inp"
    ):
        VISION_LANGUAGE.begin(model, text, first)
    suite = suite_of("qwen2_vl")
    with pytest.raises(CalibrationError, match=r"32 patches, image_grid_thw 16.*samples_per_task"):
        run_fast(suite, samples_per_task=3)


def test_single_images_are_cut_to_the_number_of_samples():
    suite = suite_of("qwen2_vl")
    for number, task in enumerate(suite.inputs):
        suite.inputs[task] = [vision_language_batch([3], 10 * number + n) for n in range(3)]
    found = run_fast(suite, samples_per_task=2).model
    suite.inputs = {task: batches[:2] for task, batches in suite.inputs.items()}
    assert_same(found, run_slow(suite).model)
