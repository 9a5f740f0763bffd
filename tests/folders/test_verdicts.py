"""Experts that cannot do their task, and tasks that end no closer to their experts."""

import math

import pytest
import torch

from fusion_bench_featcal.folders.tasks import Score
from fusion_bench_featcal.folders.verdict import Verdict, compare, weak_experts


def score(losses: list[float], right: float) -> Score:
    return Score(right, torch.tensor(losses, dtype=torch.float64), None)


@pytest.mark.parametrize(
    ("losses", "right", "is_weak"),
    [
        ([4, 5, 4, 5], 0.1, True),
        ([math.nan] * 4, 0, True),
        # right more often, close, within the interval
        ([4, 5, 4, 5], 0.3, False),
        ([2.05, 3.05, 2.05, 2.05], 0, False),
        ([9, 1, 2, 2], 0, False),
    ],
)
def test_an_expert_that_loses_to_the_merged_model_is_noted(losses, right, is_weak):
    expert, merged = score(losses, right), score([2, 3, 2, 2], 0.2)
    text = f"a (loss {expert.loss:.2f} on 4 rows, the merged model 2.25)"
    assert weak_experts({"a": expert}, {"a": merged}) == [text] * is_weak


NOISE = torch.linspace(-0.02, 0.02, 20).double()


def noisy(loss: float, right: int | None = None) -> Score:
    flags = None if right is None else torch.arange(20) < right
    return Score((right or 0) / 20, loss + NOISE, flags)


def verdict_of(**pairs: tuple[Score, Score]) -> Verdict:
    merged, calibrated = ({task: p[n] for task, p in pairs.items()} for n in range(2))
    return compare(merged, calibrated, "Try this.")


def test_a_gain_has_its_interval_and_its_rows():
    flags = torch.zeros(20).double()
    flags[10:14] = 1
    half = 2.0930240544 * float(flags.std()) / 20**0.5  # Student's t of 19 degrees of freedom
    verdict = verdict_of(one=(noisy(1.0, 10), noisy(0.75, 14)))
    accuracy = f"accuracy +20.0 ± {100 * half:.1f} points"
    assert verdict.gains == [f"gain of one on 20 rows: {accuracy}, loss -0.250 ± 0.000"]
    assert verdict.is_good
    assert verdict.sentence == "verdict: better than the merged model on 1 of 1 task"


@pytest.mark.parametrize(
    ("merged", "calibrated", "reason"),
    [
        (noisy(1.0), noisy(1.0), "one (loss +0.000 ± 0.000)"),
        (noisy(1.0), noisy(1.5), "one (loss +0.500 ± 0.000)"),
        (noisy(1.0), noisy(math.nan), "one (loss +nan)"),
        (noisy(1.0, 15), noisy(0.9, 5), "one (accuracy -50.0 ± 24.0 points, loss -0.100 ± 0.000)"),
    ],
)
def test_a_task_that_is_behind(merged: Score, calibrated: Score, reason: str):
    verdict = verdict_of(one=(merged, calibrated), two=(noisy(1.0), noisy(0.5)))
    assert not verdict.is_good
    start = "verdict: better than the merged model on 1 of 2 tasks"
    assert verdict.sentence == f"{start}; not better: {reason}. Try this."


def test_a_gain_within_its_interval_is_no_gain():
    unclear = noisy(0.99)
    unclear.losses[0] += 0.1  # a mean of -0.005, and a standard error of 0.005
    one_row = score([1.0], 0), score([0.5], 0)
    verdict = verdict_of(a=(noisy(1.0), unclear), b=one_row, c=(noisy(1.0), noisy(0.9)))
    assert verdict.is_good
    assert verdict.sentence == (
        "verdict: better than the merged model on 1 of 3 tasks; within the 95 % interval: a, b"
    )
    assert verdict.gains[1] == "gain of b on 1 row: loss -0.500"
    verdict = verdict_of()
    assert verdict.sentence == "verdict: none, as nothing was scored" and verdict.gains == []
