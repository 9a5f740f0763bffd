"""The comparison of expert, merged and repaired model on test examples, task by task."""

import math
from collections.abc import Iterable, Mapping
from statistics import fmean

from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.results.advice import Averages, Comparison
from fusion_bench_featcal.results.names import LOSS
from fusion_bench_featcal.results.statistics import (
    Difference,
    difference,
    mean_difference,
    normal_p,
)

Scores = Mapping[str, Score]

_WORSE = 0.1
"""An expert is worse if its loss exceeds the merged model's by more. It may use other words."""


def compare_scores(
    experts: Scores, merged: Scores, repaired: Scores
) -> tuple[list[Comparison], Averages]:
    """Compare the scores of three models on the same examples, with 95 % intervals.

    Tasks without an expert are compared without it.

    Returns:
        The tasks, and the averages over them, which are None if metrics differ or an expert is
        missing.
    """
    comparisons, pairs = [], ((repaired, merged), (experts, merged), (experts, repaired))
    for task, before in merged.items():
        expert, after = experts.get(task), repaired[task]
        gain, gap, rest = (_compare(*pair, [task]) for pair in pairs)
        assert gain is not None  # both models have all tasks
        # Losses of encoders are another form of their metric.
        has_losses = after.metric != LOSS and after.terms is None
        losses = mean_difference((before.losses - after.losses).numpy()) if has_losses else None
        comparison = Comparison(
            task=task,
            metric=after.metric,
            examples=len(after.losses),
            expert=expert and expert.value,
            merged=before.value,
            repaired=after.value,
            gain=gain,
            gap=gap,
            rest=rest,
            loss=losses,
        )
        comparisons.append(comparison)
    if len({comparison.metric for comparison in comparisons}) != 1:
        return comparisons, Averages()
    return comparisons, Averages(*(_compare(*pair, merged) for pair in pairs))


def _compare(ones: Scores, others: Scores, tasks: Iterable[str]) -> Difference | None:
    """Return the average over tasks of the first model minus the other, None without a score.

    Flags have the interval of reports. Other metrics have Student's interval for each task.
    """
    if not ones.keys() >= {*tasks}:
        return None
    sides = [{task: side[task].compared.numpy() for task in tasks} for side in (ones, others)]
    if all(ones[task].correct is not None and ones[task].terms is None for task in tasks):
        return difference(*({None: side} for side in sides))
    one, other = sides
    differences = [mean_difference(one[task] - other[task]) for task in tasks]
    if len(differences) == 1:
        return differences[0]
    value = fmean(difference.value for difference in differences)
    halves = [difference.half for difference in differences if difference.half is not None]
    if len(halves) < len(differences):
        return Difference(value, None, 1, None)
    half = math.hypot(*halves) / len(differences)
    return Difference(value, half, 1, normal_p(value, half))


def experts_below_merged(experts: Scores, merged: Scores) -> list[str]:
    """Describe each expert that is worse than the merged model, by loss and by accuracy."""
    return [
        f"{task} (loss {expert.loss:.2f} on {len(expert.losses)} examples, the merged model "
        f"{merged[task].loss:.2f})"
        for task, expert in experts.items()
        if mean_difference((expert.losses - merged[task].losses - _WORSE).numpy()).is_above()
        and expert.accuracy <= merged[task].accuracy
    ]
