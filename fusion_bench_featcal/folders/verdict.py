"""The verdict after `featcal calibrate`: gain of each task, and tasks that did not improve."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion_bench_featcal.agreement import Agreement, sentence_on
from fusion_bench_featcal.folders.tasks import Score
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results.statistics import student
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings


class NotImproved(CalibrationError):
    """With --strict, a task ends no closer to its expert, so nothing is saved."""


@dataclass(frozen=True)
class Verdict:
    """Comparison of the calibrated model with the merged one on held-out samples.

    Attributes:
        gains: A sentence for each evaluated task, with 95 % intervals over its rows.
        sentence: The conclusion.
        is_good: Whether every task ends closer to its expert.
    """

    gains: list[str]
    sentence: str
    is_good: bool

    @classmethod
    def of(
        cls,
        merged: Mapping[str, Score],
        calibrated: Mapping[str, Score],
        agreement: Agreement,
        settings: FeatCalSettings,
    ) -> "Verdict":
        """Compare two models.

        A task is behind if its final features are no closer to the expert's features, or if its
        score falls by more than chance (95 %). Without samples for features, its loss must fall.

        Args:
            merged: Task -> the merged model's score.
            calibrated: Task -> the calibrated model's score, on the same rows.
            agreement: Agreement of final features with the experts' features.
            settings: Settings of the calibration.
        """
        cosine, gains = agreement.cosine, []
        behind = {
            task: f"cosine of features {cosine[task]:.4f}, merged {agreement.merged[task]:.4f}"
            for task in agreement.behind
        }
        for task, before in merged.items():
            after = calibrated[task]
            loss, half, text = _mean((after.losses - before.losses).numpy(), ".3f")
            texts, is_behind = [], loss > half or (task not in cosine and loss >= 0)
            if before.correct is not None and after.correct is not None:
                flags = after.correct.double() - before.correct.double()
                gain, gain_half, points = _mean(100 * flags.numpy(), ".1f")
                texts.append(f"accuracy {points} points")
                is_behind |= gain < -gain_half
            texts.append(f"loss {text}")
            rows = counted(len(after.losses), "row")
            gains.append(f"gain of {task} on {rows}: {', '.join(texts)}")
            if is_behind and task not in behind:
                behind[task] = ", ".join(texts)
        tasks = len({*cosine, *merged})
        if not tasks:
            return cls(gains, "verdict: none without held-out samples", True)
        ends = "task is" if tasks == 1 else "tasks are"
        (sentence,) = sentence_on(behind, settings) or [
            f"{tasks} of {tasks} {ends} closer to the experts than the merged model is"
        ]
        return cls(gains, f"verdict: {sentence}", not behind)


def _mean(values: Any, form: str) -> tuple[float, float, str]:
    """Return the mean of values, one for each row, half of its 95 % interval, and both as text."""
    mean, half = float(values.mean()), student(values)[0] if len(values) > 1 else 0.0
    text = f"{mean:+z{form}}" + (f" ± {half:{form}}" if len(values) > 1 else "")
    return mean, half, text
