"""Experts that cannot do their task, and tasks that end no closer to their experts."""

import math
from typing import Any

import pytest
import torch

from fusion_bench_featcal.folders.tasks import Score
from fusion_bench_featcal.folders.verdict import Verdict, compare, weak_experts

NOISE = torch.linspace(-0.02, 0.02, 20).double()


def score(losses: Any, right: float) -> Score:
    return Score(right, torch.as_tensor(losses, dtype=torch.float64), None)


def noisy(loss: float, right: int | None = None) -> Score:
    flags = None if right is None else torch.arange(20) < right
    return Score((right or 0) / 20, loss + NOISE, flags)


def verdict_of(**pairs: tuple[Score, Score]) -> Verdict:
    merged, calibrated = ({task: p[n] for task, p in pairs.items()} for n in range(2))
    return compare(merged, calibrated, "Try this.")


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


# A mean of -0.005 with a standard error of 0.005, and an interval that one row does not give.
UNCLEAR = score(0.99 + NOISE + 0.1 * (torch.arange(20) == 0), 0)
ONE_ROW = (score([1.0], 0), score([0.5], 0))
BETTER, EQUAL = (noisy(1.0), noisy(0.5)), (noisy(1.0), noisy(1.0))
# The half interval of four more right of twenty, by Student's t of 19 degrees of freedom.
HALF = 100 * 2.0930240544 * float(((torch.arange(20) // 4) == 2).double().std()) / 20**0.5
BEHIND = "better than the merged model on 1 of 2 tasks; not better: one ({}). Try this."


@pytest.mark.parametrize(
    ("tasks", "is_good", "sentence", "gains"),
    [
        ({"one": (noisy(1.0, 10), noisy(0.75, 14))}, True,
         "better than the merged model on 1 of 1 task",
         [f"one on 20 rows: accuracy +20.0 ± {HALF:.1f} points, loss -0.250 ± 0.000"]),
        ({"one": EQUAL, "two": BETTER}, False, BEHIND.format("loss +0.000 ± 0.000"), None),
        ({"one": (noisy(1.0), noisy(1.5)), "two": BETTER}, False,
         BEHIND.format("loss +0.500 ± 0.000"), None),
        ({"one": (noisy(1.0), noisy(math.nan)), "two": BETTER}, False,
         BEHIND.format("loss +nan"), None),
        ({"one": (noisy(1.0, 15), noisy(0.9, 5)), "two": BETTER}, False,
         BEHIND.format("accuracy -50.0 ± 24.0 points, loss -0.100 ± 0.000"), None),
        ({"a": (noisy(1.0), UNCLEAR), "b": ONE_ROW, "c": (noisy(1.0), noisy(0.9))}, True,
         "better than the merged model on 1 of 3 tasks; within the 95 % interval: a, b",
         ["a on 20 rows: loss -0.005 ± 0.010", "b on 1 row: loss -0.500",
          "c on 20 rows: loss -0.100 ± 0.000"]),
        ({}, None, "none, as nothing was scored", []),
    ],
)  # fmt: skip
def test_a_verdict_counts_tasks_beyond_their_intervals(tasks, is_good, sentence, gains):
    verdict = verdict_of(**tasks)
    assert verdict.sentence == f"verdict: {sentence}"
    assert is_good in (None, verdict.is_good)
    assert gains is None or verdict.gains == [f"gain of {gain}" for gain in gains]
