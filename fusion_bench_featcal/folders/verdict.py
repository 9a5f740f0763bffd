"""The verdict after `featcal calibrate`: gain of each task, and tasks that did not improve."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion_bench_featcal.errors.plurals import counted
from fusion_bench_featcal.folders.tasks import Score
from fusion_bench_featcal.results.statistics import student
from fusion_bench_featcal.settings import FeatCalSettings


@dataclass(frozen=True)
class Verdict:
    """Comparison of the calibrated model with the merged one on held-back rows.

    Attributes:
        gains: A sentence for each evaluated task, with 95 % intervals over its rows.
        sentence: The conclusion.
        is_good: Whether every task improves.
    """

    gains: list[str]
    sentence: str
    is_good: bool

    @classmethod
    def of(
        cls,
        merged: Mapping[str, Score],
        calibrated: Mapping[str, Score],
        settings: FeatCalSettings,
    ) -> "Verdict":
        """Compare two models.

        A task is behind if its loss does not fall, or its accuracy falls by more than chance (95
        %).

        Args:
            merged: Task -> the merged model's score.
            calibrated: Task -> the calibrated model's score, on the same rows.
            settings: Settings of the calibration.
        """
        gains, behind = list[str](), dict[str, str]()
        for task, before in merged.items():
            after = calibrated[task]
            loss, _, text = _mean((after.losses - before.losses).numpy(), ".3f")
            texts, is_behind = [], loss >= 0
            if before.correct is not None and after.correct is not None:
                flags = after.correct.double() - before.correct.double()
                gain, gain_half, points = _mean(100 * flags.numpy(), ".1f")
                texts.append(f"accuracy {points} points")
                is_behind |= gain < -gain_half
            texts.append(f"loss {text}")
            rows = counted(len(after.losses), "row")
            gains.append(f"gain of {task} on {rows}: {', '.join(texts)}")
            if is_behind:
                behind[task] = ", ".join(texts)
        tasks = len(merged)
        if not tasks:
            return cls(gains, "verdict: none without rows to evaluate", True)
        ends = "task is" if tasks == 1 else "tasks are"
        if not behind:
            sentence = f"{tasks} of {tasks} {ends} closer to the experts than the merged model is"
            return cls(gains, f"verdict: {sentence}", True)
        advice = "FeatCal+ (method=featcal/plus)" if settings.rule == "paper" else "other samples"
        named = ", ".join(f"{task} ({figures})" for task, figures in behind.items())
        sentence = (
            f"no better than the merged model: {named}. Try more samples "
            f"(method.samples_per_task), {advice}, or leaving their experts out"
        )
        return cls(gains, f"verdict: {sentence}", False)


def _mean(values: Any, form: str) -> tuple[float, float, str]:
    """Return the mean of values, one for each row, half of its 95 % interval, and both as text."""
    mean, half = float(values.mean()), student(values)[0] if len(values) > 1 else 0.0
    text = f"{mean:+z{form}}" + (f" ± {half:{form}}" if len(values) > 1 else "")
    return mean, half, text
