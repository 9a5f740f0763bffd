"""Agreement on held-out samples, and a second calibration for tasks that are far."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, distance, run_fast
from tiny_models import Suite, clip_suite, scatter
from torch import nn

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.agreement import (
    Agreement,
    calibrate_and_compare,
    outcome_of,
    warnings_of,
)
from fusion_bench_featcal.log import CalibrationLog
from fusion_bench_featcal.problem import Request

FAR_TASKS: dict[str, Any] = {**PLUS, "held_out": 2, "task_weights": "drift"}
Outcome = Mapping[str, tuple[float, float, float]]
"""By task: cosine, the merged model's cosine, drift."""


def settings_of(**more: Any) -> FeatCalSettings:
    return FeatCalSettings(**(FAR_TASKS | more))


def compared(script: "Scripted", **more: Any) -> Any:
    """Run scripted calibrations, of models that nobody looks at."""
    request = Request(nn.Identity(), None, {}, {}, settings_of(**more), torch.device("cpu"))
    return calibrate_and_compare(request, script)


def result_of(outcome: Outcome) -> Any:
    log = CalibrationLog()
    for task, (cosine, merged, drift) in outcome.items():
        for block in ("first", "last"):  # the last block's record counts
            last = block == "last"
            log.add(
                "task",
                {
                    "task": task,
                    "held_out": 2,
                    "held_out_cosine": cosine if last else 0.0,
                    "held_out_cosine_merged": merged,
                    "held_out_drift": drift,
                },
            )
    return SimpleNamespace(log=log, reads={"totals": {"experts_read": 10}})


class Scripted:
    """Stands for calibrations, given what each will find."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes, self.calls = list(outcomes), list[FeatCalSettings]()

    def __call__(self, request: Request) -> Any:
        self.calls.append(request.settings)
        return result_of(self.outcomes[len(self.calls) - 1])


def flat(cosine: float, drift: float = 0.1) -> Outcome:
    return {"a": (cosine, 0.5, drift), "b": (cosine, 0.5, drift), "c": (cosine, 0.5, drift)}


FAR: Outcome = {"a": (0.9, 0.5, 0.1), "b": (0.9, 0.5, 0.1), "c": (0.6, 0.5, 0.4)}


def test_a_far_task_gets_weight_in_proportion_to_its_drift():
    script = Scripted(FAR, flat(0.97))
    best = compared(script, checkpoint_dir="here")
    first, second = script.calls
    assert (first.task_weights, first.checkpoint_dir) == (None, "here")
    assert second.task_weights == pytest.approx({"a": 0.5, "b": 0.5, "c": 2.0})
    assert second.checkpoint_dir == "here/drift_weights"
    assert best.reads["totals"]["experts_read"] == 20  # of both
    (record,) = best.log.of_kind("drift_weights")
    assert record["kept"] and record["cosine_before"] == pytest.approx(0.8)
    (line,) = outcome_of(best.log)
    assert "c 2.00" in line and "kept" in line and "0.9700, before 0.8000" in line
    assert outcome_of(CalibrationLog()) == []


BEHIND: Outcome = {**flat(0.99), "b": (0.5, 0.5, 0.1)}


@pytest.mark.parametrize(("second", "kept"), [(flat(0.7), False), (BEHIND, False), (FAR, False)])
def test_a_second_calibration_that_helps_less_is_dropped(second: Outcome, kept: bool):
    best = compared(Scripted(FAR, second))
    (record,) = best.log.of_kind("drift_weights")
    assert record["kept"] is kept and "dropped" in outcome_of(best.log)[0]
    assert Agreement.of(best.log).mean == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("outcome", "more"),
    [(flat(0.9), {}), (FAR, {"task_weights": None}), (FAR, {"task_weights": {"c": 2.0}}), ({}, {})],
)
def test_one_calibration_where_drift_is_even_or_weights_are_given(outcome, more):
    script = Scripted(outcome)
    compared(script, **more)
    assert [call.task_weights for call in script.calls] == [more.get("task_weights")]


PAPERS: dict[str, Any] = {"rule": "paper", "task_weights": None}


@pytest.mark.parametrize(
    ("settings", "behind", "said", "unsaid"),
    [
        ({}, "c", ["other samples, or leaving their experts out"], ["featcal/plus"]),
        (PAPERS, "abc", ["FeatCal+ (method=featcal/plus), or leaving"], ["other samples"]),
    ],
)
def test_advice_fits_the_run(
    settings: dict[str, Any], behind: str, said: list[str], unsaid: list[str]
):
    outcome = {task: (0.4 if task in behind else 0.9, 0.5, 0.1) for task in "abc"}
    (line,) = warnings_of(Agreement.of(result_of(outcome).log), settings_of(**settings))
    named = [task for task in "abc" if f"{task} (cosine 0.4000, merged 0.5000)" in line]
    assert named == list(behind) and line.count("cosine") == len(behind)
    assert all(text in line for text in said) and not any(text in line for text in unsaid)


def test_no_advice_where_all_tasks_are_closer():
    assert warnings_of(Agreement.of(result_of(FAR).log), settings_of()) == []


SAMPLES_ALONE = {"_target_": "fusion_bench_featcal.rules.plus.Plus", "gamma": 0.0}
FAR_SUITE: dict[str, Any] = FAR_TASKS | {"rule": SAMPLES_ALONE, "held_out": 8}


def far_suite() -> Suite:
    """One expert is much farther from the merged model than the others."""
    suite = clip_suite(tasks=3, sizes=(24, 12), seed=3)
    return replace(
        suite, experts=suite.experts | {"task_2": scatter(suite.experts["task_2"], 5, 0.2)}
    )


def test_the_model_that_is_kept_is_that_of_its_weights():
    result = run_fast(far_suite(), **FAR_SUITE)
    (record,) = result.log.of_kind("drift_weights")
    weights = record["weights"] if record["kept"] else {}
    assert max(record["weights"], key=record["weights"].__getitem__) == "task_2"
    once: dict[str, Any] = FAR_SUITE | {"task_weights": weights}
    alone = run_fast(far_suite(), **once)
    assert_identical(result.model, alone.model)
    json.dumps(result.log.plain_records())


def test_each_calibration_has_a_folder_of_its_own(tmp_path: Path):
    suite, folder = far_suite(), tmp_path / "blocks"
    whole = run_fast(suite, **FAR_SUITE)
    first = run_fast(suite, checkpoint_dir=str(folder), **FAR_SUITE)
    again = run_fast(suite, checkpoint_dir=str(folder), resume=True, **FAR_SUITE)
    for result in (first, again):
        assert_identical(result.model, whole.model)
    assert (folder / "drift_weights").is_dir() and again.log.of_kind("resumed")


def test_factors_scale_the_tasks_weights():
    suite = clip_suite(tasks=2)
    plain = run_fast(suite, **PLUS).model
    same = run_fast(suite, task_weights={"task_0": 3.0, "task_1": 3.0}, **PLUS).model
    assert distance(same, plain) < 1e-9  # no common factor matters
    other = run_fast(suite, task_weights={"task_0": 3.0}, **PLUS).model
    assert distance(other, plain) > 1e-4
