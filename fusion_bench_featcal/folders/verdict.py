"""The verdict after `featcal calibrate`, and experts that are worse than the merged model."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.errors.plurals import counted
from fusion_bench_featcal.folders.tasks import FEW_ROWS
from fusion_bench_featcal.results.statistics import student

_WORSE = 0.1
"""Smallest excess loss of an expert over the merged model. An expert may use other words."""


class Mean(NamedTuple):
    """Mean of one value for each row, and half of its 95 % interval, infinite for a single row."""

    value: float
    half: float

    @classmethod
    def of(cls, values: Tensor) -> "Mean":
        """Return the mean of float64 values, `[rows]`."""
        half = student(values.numpy())[0] if len(values) > 1 else math.inf
        return cls(float(values.mean()), half)

    @property
    def is_above(self) -> bool:
        """True if the interval is above 0, or the mean is NaN."""
        return not self.value <= self.half

    def text(self, form: str) -> str:
        """Return mean and interval as text."""
        interval = f" ± {self.half:{form}}" if math.isfinite(self.half) else ""
        return f"{self.value:+z{form}}{interval}"


class Verdict(NamedTuple):
    """Comparison of the calibrated model with the merged one on held-back rows.

    Attributes:
        gains: Task -> a sentence, with 95 % intervals over its rows.
        sentence: The conclusion.
        is_good: Whether no task is behind.
    """

    gains: dict[str, str]
    sentence: str
    is_good: bool


def compare(
    merged: Mapping[str, Score],
    calibrated: Mapping[str, Score],
    advice: str,
    held_back: Collection[str] = (),
) -> Verdict:
    """Compare two models.

    A task is behind if its mean loss does not fall, or its accuracy falls beyond the 95 % interval.
    Any other task is better if its loss falls or its accuracy rises beyond it. Tasks with few rows
    are neither.

    Args:
        merged: Task -> the merged model's score.
        calibrated: Task -> the calibrated model's score, on the same rows.
        advice: Sentence on what to try if a task is behind.
        held_back: Tasks whose rows are of the same source as their samples. These rows cannot show
            that the samples are unlike the data in use.
    """
    gains, better, unclear, behind, few = dict[str, str](), 0, list[str](), list[str](), list[str]()
    for task, before in merged.items():
        after, texts = calibrated[task], []
        fall = Mean.of(before.losses - after.losses)
        accuracy = Mean(0.0, 0.0)
        if before.correct is not None and after.correct is not None:
            accuracy = Mean.of(100 * (after.correct.double() - before.correct.double()))
            texts.append(f"accuracy {accuracy.text('.1f')} points")
        texts.append(f"loss {Mean(-fall.value, fall.half).text('.3f')}")
        rows, figures = counted(len(after.losses), "row"), ", ".join(texts)
        gains[task] = f"gain of {task} on {rows}: {figures}"
        if len(after.losses) < FEW_ROWS:
            few.append(f"{task} ({rows})")
        elif not fall.value > 0 or accuracy.value < -accuracy.half:
            behind.append(f"{task} ({figures})")
        elif fall.is_above or accuracy.is_above:
            better += 1
        else:
            unclear.append(task)
    if not merged:
        return Verdict(gains, "verdict: none, as nothing was scored", True)
    sentences = [
        f"better than the merged model on {better} of {counted(len(merged), 'task')}"
        + _source([task for task in merged if task in held_back], len(merged))
    ]
    sentences += [f"within the 95 % interval: {', '.join(unclear)}"] if unclear else []
    sentences += [f"too few rows to compare (below {FEW_ROWS}): {', '.join(few)}"] if few else []
    sentences += [f"not better: {', '.join(behind)}. {advice}".rstrip()] if behind else []
    return Verdict(gains, f"verdict: {'; '.join(sentences)}", not behind)


def _source(held_back: Sequence[str], tasks: int) -> str:
    """Return the end of a sentence on the rows of tasks that have no data of their own."""
    names = f" ({', '.join(held_back)})" if len(held_back) < tasks else ""
    return f", on held-back rows of the same source{names}" if held_back else ""


def weak_experts(experts: Mapping[str, Score], merged: Mapping[str, Score]) -> list[str]:
    """Describe each expert that is worse than the merged model, by loss and by accuracy."""
    return [
        f"{task} (loss {expert.loss:.2f} on {len(expert.losses)} rows, the merged model "
        f"{merged[task].loss:.2f})"
        for task, expert in experts.items()
        if Mean.of(expert.losses - merged[task].losses - _WORSE).is_above
        and expert.accuracy <= merged[task].accuracy
    ]
