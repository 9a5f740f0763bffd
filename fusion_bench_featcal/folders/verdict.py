"""The verdict of `featcal calibrate`: a comparison of models on test examples, task by task."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.folders.tasks import FEW_EXAMPLES
from fusion_bench_featcal.results import ACCURACY
from fusion_bench_featcal.results.notes import Note
from fusion_bench_featcal.results.statistics import ADDED_DIFFERENCES, Difference, mean_difference
from fusion_bench_featcal.results.tables import Unit

_WORSE = 0.1
"""An expert is worse if its loss exceeds the merged model's by more. It may use other words."""
LEAST_LOSS = 0.01
"""Smallest change of the loss that counts. It changes a right answer's probability by 1 %."""


class TaskChange(NamedTuple):
    """Change of a task's scores from the merged to the calibrated model.

    Attributes:
        examples: Number of test examples.
        loss: Rise of the loss.
        accuracy: Rise of the accuracy. None if it counts tokens.
    """

    examples: int
    loss: Difference
    accuracy: Difference | None

    @classmethod
    def of(cls, before: Score, after: Score) -> "TaskChange":
        """Compare the scores of two models on the same examples."""
        accuracy = None
        flags, shares = (before.correct, after.correct), (before.word_scores, after.word_scores)
        for (old, new), added in ((flags, ADDED_DIFFERENCES), (shares, None)):
            if old is not None and new is not None:
                accuracy = mean_difference((new.double() - old.double()).numpy(), added)
        loss = mean_difference((after.losses - before.losses).numpy())
        return cls(len(after.losses), loss, accuracy)

    @property
    def kind(self) -> str:
        """`few`, `worse`, `better` or `unclear`."""
        accuracy = self.accuracy or Difference(0.0, 0.0, 1, None)
        if self.examples < FEW_EXAMPLES:
            return "few"
        if self.loss.is_above(LEAST_LOSS) or accuracy.is_below():
            return "worse"
        return "better" if self.loss.is_below(LEAST_LOSS) or accuracy.is_above() else "unclear"

    @property
    def text(self) -> str:
        """Both changes with their intervals."""
        text = f"loss {Unit.of('loss').difference(self.loss)}"
        if self.accuracy is None:
            return text
        return f"accuracy {Unit.of(ACCURACY).difference(self.accuracy)} points, {text}"


class Verdict(NamedTuple):
    """Comparison of the calibrated model with the merged one on test examples.

    Attributes:
        gains: Task -> a sentence, with 95 % intervals over its examples.
        sentence: The conclusion.
        is_good: Whether a task was compared, none is worse, and there are no warnings.
    """

    gains: dict[str, str]
    sentence: str
    is_good: bool


def compare(
    merged: Mapping[str, Score],
    calibrated: Mapping[str, Score],
    advice: str,
    held_out: Collection[str] = (),
    repeating: Sequence[str] = (),
    unscored: Collection[str] = (),
    warnings: Sequence[Note] = (),
) -> Verdict:
    """Compare two models.

    A task is worse if its mean loss rises or its accuracy falls, and Student's 95 % interval of the
    differences of its examples does not include 0. Otherwise it is better if its loss falls or its
    accuracy rises in the same sense. A loss has to change by 0.01 at least. Tasks with few examples
    are neither better nor worse.

    Args:
        merged: Task -> the merged model's score.
        calibrated: Task -> the calibrated model's score, on the same examples.
        advice: Sentence on what to try if a task is worse.
        held_out: Tasks whose test examples were held out of their samples. Such examples cannot
            show that the samples are unlike the data in use.
        repeating: Tasks whose test examples repeat their samples.
        unscored: Tasks without scores.
        warnings: Warnings that the models or data may not be the intended ones.
    """
    changes = {task: TaskChange.of(before, calibrated[task]) for task, before in merged.items()}
    by_kind = defaultdict[str, dict[str, TaskChange]](dict)
    for task, change in changes.items():
        by_kind[change.kind][task] = change
    unclear, few, worse = by_kind["unclear"], by_kind["few"], by_kind["worse"]
    rows = {task: pluralize(change.examples, "row") for task, change in changes.items()}
    clauses = ["none, as nothing was scored"]
    if merged:
        count = f"{len(by_kind['better'])} of {pluralize(len(merged), 'task')}"
        same_source = [task for task in merged if task in held_out]
        names = f" ({', '.join(same_source)})" if len(same_source) < len(merged) else ""
        source = f", on held-back rows of the same source{names}" if same_source else ""
        clauses = [f"better than the merged model on {count} by Student's 95 % interval{source}"]
        clauses += [f"test rows repeat samples: {', '.join(repeating)}"] if repeating else []
        clauses += [f"not scored: {', '.join(unscored)}"] if unscored else []
    clauses += [f"no clear change: {', '.join(unclear)}"] if unclear else []
    counts = ", ".join(f"{task} ({rows[task]})" for task in few)
    clauses += [f"too few rows to compare (below {FEW_EXAMPLES}): {counts}"] if few else []
    changed_scores = ", ".join(f"{task} ({change.text})" for task, change in worse.items())
    clauses += [f"worse: {changed_scores}. {advice}".rstrip()] if worse else []
    reasons = "; ".join(note.text for note in warnings)
    in_doubt = f"in doubt: {reasons}. Scores: " if warnings else ""
    conclusion = f"verdict: {in_doubt}{'; '.join(clauses)}"
    gains = {t: f"gain of {t} on {rows[t]}: {change.text}" for t, change in changes.items()}
    return Verdict(gains, conclusion, bool(merged) and not worse and not warnings)


def experts_below_merged(experts: Mapping[str, Score], merged: Mapping[str, Score]) -> list[str]:
    """Describe each expert that is worse than the merged model, by loss and by accuracy."""
    return [
        f"{task} (loss {expert.loss:.2f} on {len(expert.losses)} rows, the merged model "
        f"{merged[task].loss:.2f})"
        for task, expert in experts.items()
        if mean_difference((expert.losses - merged[task].losses - _WORSE).numpy()).is_above()
        and expert.accuracy <= merged[task].accuracy
    ]
