"""The verdict on a calibration, from scores and agreement that are made up."""

import pytest
import torch

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.agreement import Agreement
from fusion_bench_featcal.folders.tasks import Score
from fusion_bench_featcal.folders.verdict import Verdict

NONE = Agreement({}, {}, {})
NOISE = torch.linspace(-0.02, 0.02, 20).double()


def score(loss: float, right: int | None = None) -> Score:
    flags = None if right is None else torch.arange(20) < right
    return Score((right or 0) / 20, loss + NOISE, flags, 5, "class")


def of(merged: Score, calibrated: Score, agreement: Agreement = NONE) -> Verdict:
    settings = FeatCalSettings.plus()
    return Verdict.of({"one": merged}, {"one": calibrated}, agreement, settings)


def close(cosine: float) -> Agreement:
    return Agreement({"one": cosine}, {"one": 0.8}, {"one": 0.1})


def test_a_gain_has_its_interval_and_its_rows():
    flags = torch.zeros(20).double()
    flags[10:14] = 1
    half = 2.0930240544 * float(flags.std()) / 20**0.5  # Student's t of 19 degrees of freedom
    verdict = of(score(1.0, 10), score(0.75, 14))
    assert verdict.gains == [
        f"gain of one on 20 rows: accuracy +20.0 ± {100 * half:.1f} points, loss -0.250 ± 0.000"
    ]
    assert verdict.is_good
    assert (
        verdict.sentence == "verdict: 1 of 1 task is closer to the experts than the merged model is"
    )


@pytest.mark.parametrize(
    ("merged", "calibrated", "agreement", "reason"),
    [
        (score(1.0), score(1.0), NONE, "one (loss +0.000 ± 0.000)"),
        (score(1.0), score(0.5), close(0.8), "one (cosine of features 0.8000, merged 0.8000)"),
        (score(1.0), score(1.5), close(0.9), "one (loss +0.500 ± 0.000)"),
        (score(1.0, 15), score(0.9, 5), close(0.9), "one (accuracy -50.0 ± 24.0 points"),
    ],
)
def test_a_task_that_is_behind(merged, calibrated, agreement, reason):
    verdict = of(merged, calibrated, agreement)
    assert not verdict.is_good and verdict.sentence is not None
    assert f"no closer to their experts than the merged model on held-out samples: {reason}" in (
        verdict.sentence
    )


def test_no_more_than_chance_is_not_behind():
    after = score(1.0)
    after.losses[0] += 0.1
    assert of(score(1.0, 10), after, close(0.9)).is_good


def test_without_held_out_samples_there_is_no_verdict():
    verdict = Verdict.of({}, {}, NONE, FeatCalSettings())
    assert verdict.sentence == "verdict: none without held-out samples" and verdict.gains == []
