"""Advice on a repaired model, from scores of several models on the same examples.

A task is better or worse if the scores of its examples change by more than chance explains: a
two-sided p-value below 5 % after Holm's correction for the number of tasks. The rule and how
often it is wrong are in `docs/explanation/verdict.md`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fusion_bench_featcal.errors.plurals import pluralize

from .names import LOSS
from .statistics import Difference, holm
from .tables import Unit

SURE = 0.05
"""Largest p-value, after the correction, of a change that counts."""
FEW_EXAMPLES = 5
"""Number of test examples below which a task is not compared."""
NEAR = 0.05
"""Largest end of an interval around two models' difference that is called level."""
LEAST_LOSS = 0.01
"""Smallest change of the loss that counts. It changes a right answer's probability by 1 %."""

LEAST_LEAD = 0.01
"""Smallest lead of the experts over the base, on average, with which methods are told apart."""

BETTER, WORSE, LEVEL, FEW = "better", "worse", "level", "too few"
USE, KEEP, REJECT, UNCLEAR, WEAK = "use", "keep", "reject", "unclear", "weak experts"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Scores of one task's expert, merged and repaired model on the same test examples.

    Differences are positive where the first model is better, also for losses and error rates.

    Attributes:
        task: The task.
        metric: Name of the metric.
        examples: Number of test examples, or None if there are no results per example.
        expert: The expert's score, or None.
        merged: The merged model's score.
        repaired: The repaired model's score.
        gain: Repaired minus merged model.
        gap: Expert minus merged model, or None without an expert.
        rest: Expert minus repaired model, or None without an expert.
        loss: Fall of the loss from the merged to the repaired model, or None if it is not known or
            is the metric.
    """

    task: str
    metric: str
    examples: int | None
    expert: float | None
    merged: float
    repaired: float
    gain: Difference
    gap: Difference | None = None
    rest: Difference | None = None
    loss: Difference | None = None

    @property
    def p(self) -> float:
        """The p-value of a change of the metric or the loss, 0 if one of them is not finite."""
        tests = [p_value(self.gain, self.metric)]
        tests += [p_value(self.loss, LOSS)] if self.loss else []
        return min(1.0, len(tests) * min(tests))

    def verdict(self, p: float) -> str:
        """Return what happened to the task, given its corrected p-value."""
        if p > SURE:
            is_near = self.gain.half is not None and abs(self.gain.value) + self.gain.half <= NEAR
            return LEVEL if is_near else UNCLEAR
        decides = self.loss is None or 2 * p_value(self.gain, self.metric) <= SURE
        change = self.gain if decides or self.loss is None else self.loss
        return (BETTER if change.value > 0 else WORSE) + " (loss)" * (not decides)

    @property
    def change_text(self) -> str:
        """The changes of score and loss, with their intervals."""
        text = Unit.of(self.metric).difference(self.gain)
        text += f" in {LOSS}" if self.metric == LOSS else " points"
        return f"{text}, loss {Unit.of(LOSS).difference(self.loss.negated)}" if self.loss else text


def p_value(change: Difference, metric: str) -> float:
    """Return a change's p-value: 0 if it is not finite, 1 if it is small or has no interval."""
    if math.isnan(change.value):
        return 0.0
    is_small = metric == LOSS and abs(change.value) < LEAST_LOSS
    return 1.0 if change.p is None or is_small else change.p


def task_verdicts(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """Return each task's verdict.

    It is `better` or `worse`, with `(loss)` if the loss decides, or else `level` if the interval
    excludes changes of more than `NEAR`, `unclear`, or `too few` examples.
    """
    verdicts = {comparison.task: FEW for comparison in comparisons}
    compared = [c for c in comparisons if c.examples is None or c.examples >= FEW_EXAMPLES]
    for comparison, p in zip(compared, holm([c.p for c in compared]), strict=True):
        verdicts[comparison.task] = comparison.verdict(p)
    return verdicts


class Averages(NamedTuple):
    """Averages over tasks of the differences in `Comparison`. None if they cannot be averaged."""

    gain: Difference | None = None
    gap: Difference | None = None
    rest: Difference | None = None


class Advice(NamedTuple):
    """Advice on a repaired model.

    Attributes:
        kind: `use`, `keep` (the merged model), `reject`, `unclear` or `weak experts`.
        sentence: The advice.
    """

    kind: str
    sentence: str


def advise(
    comparisons: Sequence[Comparison],
    averages: Averages,
    *,
    name: str = "the repaired model",
    merged: str = "the merged model",
    lead: Difference | None = None,
    more_examples: str = "",
    if_worse: str = "",
    further: Sequence[Comparison] = (),
) -> Advice:
    """Return the advice on a repaired model.

    Args:
        comparisons: The tasks.
        averages: Averages over the tasks.
        name: Name of the repaired model.
        merged: Name of the merged model.
        lead: Average of the experts minus that of the base, if the base was evaluated.
        more_examples: Sentence on how to get more test examples.
        if_worse: Sentence on what to try if a task is worse.
        further: Tasks that the calibration had no samples of. Those that are worse are named if the
            model is better on the others.
    """
    if not comparisons:
        text = f"Cannot tell whether {name} is better than {merged}: no scores. {more_examples}"
        return Advice(UNCLEAR, text)
    verdicts, tasks = task_verdicts(comparisons), pluralize(len(comparisons), "task")
    worse = [c for c in comparisons if verdicts[c.task].startswith(WORSE)]
    better = [c for c in comparisons if verdicts[c.task].startswith(BETTER)]
    unit = _points(comparisons)
    gain, gap, rest = averages
    if unit and lead and lead.half is not None and not lead.is_above(LEAST_LEAD):
        sentence = (
            "No model can be recommended: the experts are hardly better than the base "
            f"({unit(lead)} on average), so methods cannot be told apart here. "
            "Check the experts and their data"
        )
        return Advice(WEAK, sentence)
    is_clear = gain is not None and p_value(gain, comparisons[0].metric) <= SURE
    if worse or (is_clear and gain and gain.value < 0):
        text = f"{len(worse)} of {tasks}, {_list_changes(worse)}" if worse else "average"
        if unit and gain and not worse:
            text += f" ({unit(gain)})"
        text = f"Do not use {name}: it is worse than {merged} on {text}"
        return Advice(REJECT, ". ".join(filter(None, (text, if_worse))))
    if better or is_clear:
        text = f"{len(better)} of {tasks}" if better else "average"
        text = f"Use {name}: it is better than {merged} on {text}"
        if unit and gain:
            text += f" ({unit(gain)}{' on average' if better and len(comparisons) > 1 else ''})"
        text += f", and {_position(rest, unit)}" if unit and rest else ""
        lost = [c for c, verdict in zip(further, task_verdicts(further).values(), strict=True)
                if verdict.startswith(WORSE)]  # fmt: skip
        if lost:
            text += f". But it is worse on {_list_changes(lost)}, which it was not calibrated on"
        return Advice(USE, text)
    if unit and gap and gap.half is not None and gap.value + gap.half <= NEAR:
        position = _position(gap, unit)
        text = f"Keep {merged}: it is {position}, so there is nothing to repair"
        return Advice(KEEP, text)
    text = _unclear(comparisons, gain, unit, name, merged)
    return Advice(UNCLEAR, ". ".join(filter(None, (text, more_examples))))


def _list_changes(comparisons: Sequence[Comparison]) -> str:
    return ", ".join(f"{c.task} ({c.change_text})" for c in comparisons)


def _points(comparisons: Sequence[Comparison]) -> Callable[[Difference], str] | None:
    """Return a function that writes an average over tasks, or None if their metrics differ."""
    metrics = {comparison.metric for comparison in comparisons}
    if len(metrics) > 1:
        return None
    (metric,) = metrics
    name = f" in {LOSS}" if metric == LOSS else " points"
    return lambda difference: Unit.of(metric).difference(difference) + name


def _position(rest: Difference, unit: Callable[[Difference], str]) -> str:
    """Write where a model stands, given the experts' average minus its own."""
    if rest.half is not None and abs(rest.value) <= rest.half:
        return f"level with the experts (difference {unit(rest.negated)})"
    return f"{unit(rest).lstrip('+-')} {'below' if rest.value > 0 else 'above'} the experts"


def _unclear(
    comparisons: Sequence[Comparison],
    gain: Difference | None,
    unit: Callable[[Difference], str] | None,
    name: str,
    merged: str,
) -> str:
    """Write why nothing can be told, with the smallest change that could be seen."""
    text = f"Cannot tell whether {name} is better than {merged}"
    if unit is None or gain is None:
        return f"{text}: no task differs by more than chance explains"
    if gain.half is None or math.isnan(gain.half):
        return f"{text}: there is no interval. Repeat the run with at least three seeds"
    metric, count = comparisons[0].metric, sum(c.examples or 0 for c in comparisons)
    least = f"{Unit.of(metric).value(gain.half)} {'in loss' if metric == LOSS else 'points'}"
    examples = f" with {pluralize(count, 'test example')}" if count else ""
    return f"{text}: differences below {least} cannot be seen{examples}"
