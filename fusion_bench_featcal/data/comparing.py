"""The comparison of expert, merged and repaired model on test examples, task by task."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from types import MappingProxyType

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
    experts: Scores, merged: Scores, repaired: Scores, base: Scores = MappingProxyType({})
) -> tuple[list[Comparison], Averages, list[Comparison]]:
    """Compare the scores of models on the same examples, with 95 % intervals.

    Args:
        experts: Task -> score of its expert.
        merged: Task -> score of the merged model. A task may have no expert.
        repaired: Task -> score of the repaired model.
        base: Task without an expert -> score of the base, if there is one.

    Returns:
        The tasks with an expert, the averages over them, which are None if their metrics differ,
        and the tasks without an expert, with the base in its place.
    """
    references = {**base, **experts}
    pairs = (repaired, merged), (references, merged), (references, repaired)
    comparisons, further = list[Comparison](), list[Comparison]()
    for task, before in merged.items():
        expert, after = references.get(task), repaired[task]
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
        (comparisons if task in experts else further).append(comparison)
    if len({comparison.metric for comparison in comparisons}) != 1:
        return comparisons, Averages(), further
    tasks = [comparison.task for comparison in comparisons]
    return comparisons, Averages(*(_compare(*pair, tasks) for pair in pairs)), further


def _compare(ones: Scores, others: Scores, tasks: Sequence[str]) -> Difference | None:
    """Return the average over tasks of the first model minus the other, None without a score.

    Flags have the interval of reports. Other metrics have Student's interval for each task.
    """
    if not ones.keys() >= {*tasks}:
        return None
    sides = [{task: side[task].compared.numpy() for task in tasks} for side in (ones, others)]
    if all(ones[task].correct is not None and ones[task].terms is None for task in tasks):
        return difference(*({None: side} for side in sides))
    one, other = sides
    changes = [mean_difference(one[task] - other[task]) for task in tasks]
    if len(changes) == 1:
        return changes[0]
    value = fmean(change.value for change in changes)
    halves = [change.half for change in changes if change.half is not None]
    if len(halves) < len(changes):
        return Difference(value, None, 1, None)
    half = math.hypot(*halves) / len(changes)
    return Difference(value, half, 1, normal_p(value, half))


def experts_below_merged(experts: Scores, merged: Scores) -> list[str]:
    """Describe each expert that is worse than the merged model, by loss and by accuracy."""
    return [
        f"{task} (loss {expert.loss:.2f} on {len(expert.losses)} examples, merged model: "
        f"{merged[task].loss:.2f})"
        for task, expert in experts.items()
        if mean_difference((expert.losses - merged[task].losses - _WORSE).numpy()).is_above()
        and expert.accuracy <= merged[task].accuracy
    ]
