"""Whisper and vision-language models: calibrated as by replay, and cut to single images."""

from typing import Any

import pytest
from calibrations import PLUS, assert_identical, assert_same, run_fast, run_slow
from model_types import suite_named
from tiny_models import VISION_LANGUAGE_REPLAY, WHISPER_REPLAY, Suite, vision_language_batch

from fusion_bench_featcal import CalibrationError

KINDS: dict[str, Any] = {"whisper": WHISPER_REPLAY, "qwen2_vl": VISION_LANGUAGE_REPLAY}


def suite_of(kind: str, *, single: bool = False) -> Suite:
    suite = suite_named(kind)
    for number, task in enumerate(suite.inputs if single else ()):
        suite.inputs[task] = [vision_language_batch([n], 10 * number + n) for n in (3, 4, 5)]
    return suite


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [PLUS, {"held_out": 1}], ids=["plus", "held out"])
def test_other_calibrations_equal_replay(kind, more):
    suite = suite_of(kind, single=kind == "qwen2_vl" and "held_out" in more)
    calibrated, expected = (run_fast(suite, family=f, **more).model for f in (None, KINDS[kind]))
    assert_identical(calibrated, expected)


def test_single_images_are_cut_to_the_number_of_samples_and_others_not():
    with pytest.raises(CalibrationError, match=r"32 patches, image_grid_thw 16.*samples_per_task"):
        run_fast(suite_of("qwen2_vl"), samples_per_task=3)
    suite = suite_of("qwen2_vl", single=True)
    calibrated = run_fast(suite, samples_per_task=2).model
    suite.inputs = {task: batches[:2] for task, batches in suite.inputs.items()}
    assert_same(calibrated, run_slow(suite).model)
