"""Several calibrations of one merged model, of which held-out samples choose one."""

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusion_bench_featcal.checkpoints.sources import joined_hashes
from fusion_bench_featcal.engine.log import CalibrationLog
from fusion_bench_featcal.setting_checks import MOST_SCALE
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)

LARGER = 10.0
"""Factor of the first stage's lambdas that is tried."""

UNEVEN = 2.0
"""Drift weights are tried where the largest squared drift is so many times the median."""

PAPER_TEXT = {"ridge_lambda": 1e-5, "mix_alpha": 0.6, "decoder_rows": "targets"}
"""The paper's settings for FLAN-T5, on the positions that do best."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of final features with the experts' on held-out samples, by task.

    Attributes:
        cosine: Mean cosine of the calibrated model's features to the expert's.
        merged: The same of the merged model's.
        drift: Root mean square drift of the calibrated model's, relative to the expert's norm.
        samples: Number of samples.
    """

    cosine: Mapping[str, float]
    merged: Mapping[str, float]
    drift: Mapping[str, float]
    samples: Mapping[str, int]

    @classmethod
    def of(cls, log: CalibrationLog) -> "Agreement":
        """Read it from the records of the last block; tasks without held-out samples lack."""
        last = {record["task"]: record for record in log.of_kind("task")}
        known = {task: record for task, record in last.items() if record.get("held_out")}

        def column(name: str) -> dict[str, Any]:
            return {task: record[name] for task, record in known.items()}

        return cls(
            column("held_out_cosine"),
            column("held_out_cosine_merged"),
            column("held_out_drift"),
            column("held_out"),
        )

    @property
    def mean(self) -> float:
        """Mean cosine over tasks."""
        return statistics.fmean(self.cosine.values())

    @property
    def behind(self) -> list[str]:
        """Tasks whose features are not closer to their expert's than the merged model's are."""
        return [task for task, cosine in self.cosine.items() if not cosine > self.merged[task]]

    def drift_weights(self, now: Mapping[str, float]) -> dict[str, float] | None:
        """Weights in proportion to each task's drift, of mean 1; None: the drift is even.

        Args:
            now: The factors by task with which the drift came about; tasks that lack have 1.
        """
        drifts = self.drift.values()
        if max(drifts) ** 2 <= UNEVEN * statistics.median(drift**2 for drift in drifts):
            return None
        weights = {task: now.get(task, 1.0) * drift for task, drift in self.drift.items()}
        mean = statistics.fmean(weights.values())
        return {task: weight / mean for task, weight in weights.items()}


def warnings_of(agreement: Agreement, settings: FeatCalSettings) -> list[str]:
    """A sentence for each task on which calibration brings final features no closer.

    Args:
        agreement: The agreement.
        settings: Settings of the calibration, which the advice is made for.
    """
    advice = ["Raise method.samples_per_task"]
    if settings.is_paper:
        gives_weight = "whose method.task_weights=drift gives such tasks more weight"
        advice.append(f"use method=featcal/plus, {gives_weight}")
    elif settings.task_weights != "drift":
        advice.append("set method.task_weights=drift, which gives such tasks more weight")
    if len(agreement.behind) < len(agreement.cosine):
        advice.append("drop the task")
    else:
        advice.append("check the calibration samples: all tasks are behind")
    return [
        f"{task}: on {agreement.samples[task]} held-out samples the calibrated model's final "
        f"features are no closer to the expert's than the merged model's (cosine "
        f"{agreement.cosine[task]:.4f}, merged {agreement.merged[task]:.4f}). "
        f"{', '.join(advice[:-1])}, or {advice[-1]}"
        for task in agreement.behind
    ]


def outcome_of(log: CalibrationLog) -> list[str]:
    """A sentence on which of several calibrations was kept; none where there was one."""
    trials = log.of_kind("trial")
    if len(trials) < 2:
        return []
    kept = next(trial for trial in trials if trial["kept"])
    change, given = kept["change"], trials[0]["cosine"]
    if not change:
        return [
            f"of {len(trials)} calibrations the first was kept, with the settings as given: mean "
            f"cosine of final features on held-out samples {given:.4f}"
        ]
    shown = ", ".join(f"{name}={_rounded(change[name])}" for name in change)
    return [
        f"of {len(trials)} calibrations number {kept['trial']} was kept ({shown}): mean cosine of "
        f"final features on held-out samples {kept['cosine']:.4f}, with the settings as given "
        f"{given:.4f}"
    ]


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: round(part, 2) for name, part in value.items()}
    return value


Change = dict[str, Any]


def _larger_lambdas(settings: FeatCalSettings, seen: Agreement, text: bool) -> Change | None:
    scale = settings.first_ridge_scale * LARGER
    return {"first_ridge_scale": scale} if scale <= MOST_SCALE else None


def _more_for_far_tasks(settings: FeatCalSettings, seen: Agreement, text: bool) -> Change | None:
    weights = seen.drift_weights(settings.task_factors)
    return None if weights is None else {"task_weights": weights}


def _other_rows(settings: FeatCalSettings, seen: Agreement, text: bool) -> Change:
    uniform = settings.row_weights == "uniform"
    return {"row_weights": "sensitivity" if uniform else "uniform"}


def _as_published(settings: FeatCalSettings, seen: Agreement, text: bool) -> Change:
    published = settings.with_paper_update().replace(held_out=settings.held_out)
    usual, now = published.as_dict(), settings.of_one_trial().as_dict()
    change = {name: usual[name] for name in usual if usual[name] != now[name]}
    if not settings.needs_base:  # there may be none
        change["anchor_rho"] = 1.0
    return change | {"task_weights": None} | (PAPER_TEXT if text else {})


CHANGES: tuple[Callable[[FeatCalSettings, Agreement, bool], Change | None], ...] = (
    _larger_lambdas,
    _larger_lambdas,
    _more_for_far_tasks,
    _more_for_far_tasks,
    _other_rows,
    _as_published,
)
"""Changes in the order of their trials, each of what was best so far; the second of two alike
follows where the first was kept."""


def changes_of(settings: FeatCalSettings, *, text: bool) -> tuple[Any, ...]:
    """Return the changes that a run may try, which bound its number of calibrations.

    Args:
        settings: `trials`; with `auto` larger lambdas for language models, and drift weights.
        text: Whether the model is a language model.
    """
    if settings.held_out == 0 or settings.trials == 1 or settings.expert_read_budget is not None:
        return ()  # a budget is for one calibration
    asked = settings.trials != "auto"
    goes = {
        _larger_lambdas: settings.stages == 2 and (asked or text),
        _more_for_far_tasks: settings.task_weights == "drift",
        _other_rows: asked and text and not settings.is_paper,
        _as_published: asked and not settings.is_paper,
    }
    return tuple(change for change in CHANGES if goes[change])


def calibrations_of(settings: FeatCalSettings, *, text: bool) -> int:
    """Return the most calibrations that a run takes; arguments as `changes_of`."""
    most = len(changes_of(settings, text=text)) + 1
    return most if settings.trials == "auto" else min(most, int(settings.trials))


def best_of(calibrated: Callable[..., Any], settings: FeatCalSettings, *, text: bool) -> Any:
    """Calibrate, try `changes_of` the settings, and keep what is best on held-out samples.

    A change is kept if it raises the mean cosine of final features over tasks and brings no further
    task behind the merged model.

    Args:
        calibrated: Calibrates with given settings and, after the first time, says so by
            `again=True`; a `CalibrationResult`.
        settings: The settings to begin with.
        text: Whether the model is a language model.

    Returns:
        The best result. Its log ends with a record of kind `trial` for each calibration.
    """
    start = time.perf_counter()
    best, chosen = calibrated(settings.of_one_trial()), settings
    seen, kept, read = Agreement.of(best.log), 1, best.reads["totals"]["experts_read"]
    hashes = best.reads.get("hashes")
    records = [_record(1, {}, seen, time.perf_counter() - start)]
    most = calibrations_of(settings, text=text)
    for change in changes_of(settings, text=text):
        if len(records) >= most or not seen.cosine:
            break
        changed = change(chosen, seen, text)
        if changed is None or changed in [record["change"] for record in records]:
            continue  # nothing to change, or it was tried and did not help
        number, start = len(records) + 1, time.perf_counter()
        log.info("trial %d of at most %d: %s", number, most, changed)
        new = calibrated(_numbered(chosen.replace(**changed), number), again=True)
        found = Agreement.of(new.log)
        records.append(_record(number, changed, found, time.perf_counter() - start))
        read += new.reads["totals"]["experts_read"]
        hashes = joined_hashes(hashes, new.reads.get("hashes"))
        if found.mean > seen.mean and not set(found.behind) - set(seen.behind):
            best, seen, kept, chosen = new, found, number, chosen.replace(**changed)
    best.reads["totals"]["trials_read"] = read
    best.reads["hashes"] = hashes
    for record in records:
        best.log.add("trial", {**record, "kept": record["trial"] == kept})
    return best


def _numbered(settings: FeatCalSettings, number: int) -> FeatCalSettings:
    """The settings of a trial, with a folder of its own for checkpoints."""
    folder = settings.checkpoint_dir
    own = None if folder is None else f"{folder}/trial-{number}"
    return settings.of_one_trial().replace(checkpoint_dir=own)


def _record(number: int, change: Change, seen: Agreement, seconds: float) -> dict[str, Any]:
    return {
        "trial": number,
        "change": change,
        "cosine": seen.mean if seen.cosine else None,
        "cosines": dict(seen.cosine),
        "behind": seen.behind,
        "seconds": seconds,
    }


def refuse_behind(agreement: Agreement, settings: FeatCalSettings) -> None:
    """Refuse a model that is no closer to a task's expert than the merged model.

    Args:
        agreement: Its agreement with the experts.
        settings: Settings of the calibration.

    Raises:
        CalibrationError: Naming the tasks and what to change.
    """
    if sentences := warnings_of(agreement, settings):
        raise CalibrationError(
            "; ".join(sentences) + ". To keep such a model set method.strict=false"
        )
