"""Whisper and vision-language models: calibrated as by replay, and cut to single images."""

import pytest
from calibrations import PLUS, assert_identical, assert_same, run_fast, run_slow
from model_types import VISION_LANGUAGE_REPLAY, WHISPER_REPLAY, suite_named
from tiny_models import Suite, vision_language_batch


def single_images() -> Suite:
    suite = suite_named("qwen2_vl")
    for number, task in enumerate(suite.inputs):
        suite.inputs[task] = [vision_language_batch([n], 10 * number + n) for n in (3, 4, 5)]
    return suite


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "replay"),
    [(lambda: suite_named("whisper"), WHISPER_REPLAY), (single_images, VISION_LANGUAGE_REPLAY)],
    ids=["whisper", "qwen2_vl"],
)
def test_plus_with_held_out_samples_equals_replay(make, replay):
    suite = make()
    calibrated, expected = (
        run_fast(suite, family=family, held_out=1, **PLUS).model for family in (None, replay)
    )
    assert_identical(calibrated, expected)


def test_single_images_are_cut_to_the_number_of_samples():
    suite = single_images()
    calibrated = run_fast(suite, samples_per_task=2).model
    suite.inputs = {task: batches[:2] for task, batches in suite.inputs.items()}
    assert_same(calibrated, run_slow(suite).model)
