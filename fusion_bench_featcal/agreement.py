"""Agreement with the experts on held-out samples, and a second calibration for far tasks."""

import logging
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fusion_bench_featcal.log import CalibrationLog
from fusion_bench_featcal.problem import CalibrationResult, Request
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)

UNEVEN = 2.0
"""Drift weights are tried if the largest squared drift exceeds this multiple of the median."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of final features with the experts' features on held-out samples, by task.

    Attributes:
        cosine: Mean cosine between the features of the calibrated model and of the expert.
        merged: The same for the merged model's features.
        drift: Root mean square drift of the calibrated model's features, relative to the expert's
            norm.
    """

    cosine: Mapping[str, float]
    merged: Mapping[str, float]
    drift: Mapping[str, float]

    @classmethod
    def of(cls, log: CalibrationLog) -> "Agreement":
        """Build it from the log of the last block. Tasks without held-out samples are missing."""
        last = {record["task"]: record for record in log.of_kind("task")}

        def column(name: str) -> dict[str, Any]:
            return {task: record[name] for task, record in last.items() if record.get("held_out")}

        return cls(
            column("held_out_cosine"), column("held_out_cosine_merged"), column("held_out_drift")
        )

    @property
    def mean(self) -> float:
        """Mean cosine over tasks."""
        return statistics.fmean(self.cosine.values())

    @property
    def behind(self) -> list[str]:
        """Tasks whose features are no closer to their expert's than the merged model's features."""
        return [task for task, cosine in self.cosine.items() if not cosine > self.merged[task]]

    def drift_weights(self) -> dict[str, float] | None:
        """Return weights of mean 1 in proportion to each task's drift, or None if drift is even."""
        drifts = self.drift.values()
        if not drifts or max(drifts) ** 2 <= UNEVEN * statistics.median(
            drift**2 for drift in drifts
        ):
            return None
        mean = statistics.fmean(self.drift.values())
        return {task: drift / mean for task, drift in self.drift.items()}


def warnings_of(agreement: Agreement, settings: FeatCalSettings) -> list[str]:
    """Return a sentence on the tasks whose final features are no closer to the expert."""
    cosine, merged = agreement.cosine, agreement.merged
    behind = {t: f"cosine {cosine[t]:.4f}, merged {merged[t]:.4f}" for t in agreement.behind}
    return sentence_on(behind, settings)


def sentence_on(behind: Mapping[str, str], settings: FeatCalSettings) -> list[str]:
    """Return a sentence on tasks that end no closer to their experts, or an empty list.

    Args:
        behind: Task -> figures for the sentence.
        settings: Settings of the calibration, which determine the advice.
    """
    if not behind:
        return []
    advice = "FeatCal+ (method=featcal/plus)" if settings.rule == "paper" else "other samples"
    named = ", ".join(f"{task} ({figures})" for task, figures in behind.items())
    return [
        f"no closer to their experts than the merged model on held-out samples: {named}. Try "
        f"more samples (method.samples_per_task), {advice}, or leaving their experts out"
    ]


def calibrate_and_compare(
    request: Request, calibrated: Callable[[Request], CalibrationResult]
) -> CalibrationResult:
    """Calibrate, and again with drift weights if a task remains far from its expert.

    The second model is kept if it raises the mean over tasks of the final features' cosine on
    held-out samples, and no further task falls behind the merged model.

    Args:
        request: The calibration. With `task_weights=drift` there may be a second one.
        calibrated: Calibrates with given task weights.

    Returns:
        The better result. After a second calibration its log ends with a record of kind
        `drift_weights`, and its count of reads is the sum of both.

    Raises:
        CalibrationError: If `strict` is set and a task is no closer to its expert than the merged
            model.
    """
    settings, seeks_weights = request.settings, request.settings.task_weights == "drift"
    if seeks_weights:  # a second calibration iterates over the samples again
        batches = {t: list(b) if isinstance(b, Iterator) else b for t, b in request.batches.items()}
        evenly = settings.replace(task_weights=None)
        request = replace(request, batches=batches, settings=evenly)
    best = calibrated(request)
    before = Agreement.of(best.log)
    weights = before.drift_weights() if seeks_weights else None
    if weights is not None:
        folder = settings.checkpoint_dir and f"{settings.checkpoint_dir}/drift_weights"
        log.info("calibrating again with more weight for far tasks: %s", weights)
        weighted = settings.replace(task_weights=weights, checkpoint_dir=folder)
        again = calibrated(replace(request, settings=weighted))
        after = Agreement.of(again.log)
        is_better = after.mean > before.mean and not set(after.behind) - set(before.behind)
        best, other = (again, best) if is_better else (best, again)
        best.reads["totals"]["experts_read"] += other.reads["totals"]["experts_read"]
        figures = {"weights": weights, "cosine_before": before.mean, "cosine": after.mean}
        best.log.add("drift_weights", {**figures, "kept": is_better})
    if settings.strict:
        refuse_behind(Agreement.of(best.log), settings)
    return best


def outcome_of(log: CalibrationLog) -> list[str]:
    """Return a sentence on a second calibration and its outcome, or an empty list."""
    return [
        f"calibrated again with more weight for far tasks "
        f"({', '.join(f'{task} {weight:.2f}' for task, weight in record['weights'].items())}), "
        f"{'which was kept' if record['kept'] else 'which was dropped'}: mean cosine of final "
        f"features on held-out samples {record['cosine']:.4f}, before "
        f"{record['cosine_before']:.4f}"
        for record in log.of_kind("drift_weights")
    ]


def refuse_behind(agreement: Agreement, settings: FeatCalSettings) -> None:
    """Refuse a model that is no closer to a task's expert than the merged model.

    Raises:
        CalibrationError: Naming the tasks and the settings to change.
    """
    for sentence in warnings_of(agreement, settings):
        raise CalibrationError(f"{sentence}. To keep such a model set method.strict=false")
