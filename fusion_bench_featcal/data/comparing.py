"""The comparison of expert, merged and repaired model on test examples, task by task."""

from collections.abc import Mapping

from torch import Tensor

from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.results.advice import Comparison
from fusion_bench_featcal.results.names import LOSS
from fusion_bench_featcal.results.statistics import ADDED_DIFFERENCES, Difference, mean_difference

_WORSE = 0.1
"""An expert is worse if its loss exceeds the merged model's by more. It may use other words."""


def compare_scores(
    experts: Mapping[str, Score], merged: Mapping[str, Score], repaired: Mapping[str, Score]
) -> list[Comparison]:
    """Compare the scores of three models on the same examples, with Student's 95 % intervals.

    Tasks without an expert are compared without it.
    """
    comparisons = []
    for task, before in merged.items():
        expert, after = experts.get(task), repaired[task]
        # Losses of encoders are another form of their metric.
        has_losses = after.metric != LOSS and after.terms is None
        comparison = Comparison(
            task=task,
            metric=after.metric,
            examples=len(after.losses),
            expert=expert and expert.value,
            merged=before.value,
            repaired=after.value,
            gain=_difference(after, before),
            gap=expert and _difference(expert, before),
            rest=expert and _difference(expert, after),
            loss=_mean(before.losses - after.losses) if has_losses else None,
        )
        comparisons.append(comparison)
    return comparisons


def _difference(one: Score, other: Score) -> Difference:
    """Return the mean of the first score minus that of the other."""
    flags = one.correct is not None and one.terms is None
    return _mean(one.compared - other.compared, ADDED_DIFFERENCES if flags else None)


def _mean(values: Tensor, added: Mapping[float, float] | None = None) -> Difference:
    return mean_difference(values.double().numpy(), added)


def experts_below_merged(experts: Mapping[str, Score], merged: Mapping[str, Score]) -> list[str]:
    """Describe each expert that is worse than the merged model, by loss and by accuracy."""
    return [
        f"{task} (loss {expert.loss:.2f} on {len(expert.losses)} examples, the merged model "
        f"{merged[task].loss:.2f})"
        for task, expert in experts.items()
        if mean_difference((expert.losses - merged[task].losses - _WORSE).numpy()).is_above()
        and expert.accuracy <= merged[task].accuracy
    ]
