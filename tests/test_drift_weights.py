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

DRIFT: dict[str, Any] = {**PLUS, "held_out": 2, "task_weights": "drift"}
Outcome = Mapping[str, tuple[float, float, float]]
"""By task: cosine, the merged model's cosine, drift."""


def outcome(a: float = 0.9, b: float = 0.9, c: float = 0.9, drift: float = 0.1) -> Outcome:
    return {"a": (a, 0.5, 0.1), "b": (b, 0.5, 0.1), "c": (c, 0.5, drift)}


FAR = outcome(c=0.6, drift=0.4)
SMALL = outcome(0.97, 0.97, 0.97)


def result_of(outcome: Outcome) -> Any:
    log = CalibrationLog()
    for task, (cosine, merged, drift) in outcome.items():
        for block in ("first", "last"):  # the last block's record counts
            values = {"held_out": 2, "held_out_drift": drift, "held_out_cosine_merged": merged}
            log.add("task", {"task": task, **values, "held_out_cosine": cosine * (block == "last")})
    return SimpleNamespace(log=log, reads={"totals": {"experts_read": 10}})


def compared(*outcomes: Outcome, **more: Any) -> tuple[Any, list[FeatCalSettings]]:
    """Outcome of calibrations with given outcomes, and the settings of each."""
    calls: list[FeatCalSettings] = []

    def calibrate(request: Request) -> Any:
        calls.append(request.settings)
        return result_of(outcomes[len(calls) - 1])

    settings = FeatCalSettings(**DRIFT | more)
    request = Request(nn.Identity(), None, {}, {}, settings, torch.device("cpu"))
    return calibrate_and_compare(request, calibrate), calls


def test_a_far_task_gets_weight_in_proportion_to_its_drift():
    best, (first, second) = compared(FAR, SMALL, checkpoint_dir="here")
    assert (first.task_weights, first.checkpoint_dir) == (None, "here")
    assert second.task_weights == pytest.approx({"a": 0.5, "b": 0.5, "c": 2.0})
    assert second.checkpoint_dir == "here/drift_weights"
    assert best.reads["totals"]["experts_read"] == 20  # of both
    (record,) = best.log.of_kind("drift_weights")
    assert record["kept"] and record["cosine_before"] == pytest.approx(0.8)
    (line,) = outcome_of(best.log)
    assert "c 2.00" in line and "kept" in line and "0.9700, before 0.8000" in line
    assert outcome_of(CalibrationLog()) == []


@pytest.mark.parametrize("second", [outcome(0.7, 0.7, 0.7), outcome(0.99, 0.5, 0.99), FAR])
def test_a_second_calibration_that_helps_less_is_dropped(second: Outcome):
    best, _ = compared(FAR, second)
    (record,) = best.log.of_kind("drift_weights")
    assert not record["kept"] and "dropped" in outcome_of(best.log)[0]
    assert Agreement.of(best.log).mean == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("first", "weights"), [(outcome(), "drift"), (FAR, None), (FAR, {"c": 2.0}), ({}, "drift")]
)
def test_one_calibration_if_drift_is_even_or_weights_are_given(first: Outcome, weights: Any):
    _, calls = compared(first, task_weights=weights)
    assert [call.task_weights for call in calls] == [None if weights == "drift" else weights]


@pytest.mark.parametrize(
    ("settings", "behind", "advice", "other"),
    [
        ({}, "c", "other samples, or leaving their experts out", "featcal/plus"),
        ({"rule": "paper", "task_weights": None}, "abc",
         "FeatCal+ (method=featcal/plus), or leaving", "other samples"),
    ],
)  # fmt: skip
def test_advice_fits_the_run(settings: dict[str, Any], behind: str, advice: str, other: str):
    chosen = FeatCalSettings(**DRIFT | settings)
    agreement = Agreement.of(result_of(outcome(**dict.fromkeys(behind, 0.4))).log)
    (line,) = warnings_of(agreement, chosen)
    named = [task for task in "abc" if f"{task} (cosine 0.4000, merged 0.5000)" in line]
    assert named == list(behind) and line.count("cosine") == len(behind)
    assert advice in line and other not in line
    assert warnings_of(Agreement.of(result_of(FAR).log), chosen) == []


def far_suite() -> Suite:
    """One expert is much farther from the merged model than the others."""
    suite = clip_suite(tasks=3, sizes=(24, 12), seed=3)
    return replace(
        suite, experts=suite.experts | {"task_2": scatter(suite.experts["task_2"], 5, 0.2)}
    )


def test_the_kept_model_is_that_of_its_weights_and_is_resumed(tmp_path: Path):
    rule = {"_target_": "fusion_bench_featcal.rules.plus.Plus", "gamma": 0.0}
    settings: dict[str, Any] = DRIFT | {"rule": rule, "held_out": 8}
    suite, folder = far_suite(), tmp_path / "blocks"
    result = run_fast(suite, checkpoint_dir=str(folder), **settings)
    (record,) = result.log.of_kind("drift_weights")
    assert max(record["weights"], key=record["weights"].__getitem__) == "task_2"
    weights = record["weights"] if record["kept"] else {}
    alone = run_fast(suite, **settings | {"task_weights": weights})
    assert_identical(result.model, alone.model)
    json.dumps(result.log.plain_records())
    assert (folder / "drift_weights").is_dir()
    again = run_fast(suite, checkpoint_dir=str(folder), resume=True, **settings)
    assert_identical(again.model, result.model)
    assert again.log.of_kind("resumed")


def test_only_the_ratio_of_task_weights_matters():
    suite = clip_suite(tasks=2)
    plain = run_fast(suite, **PLUS).model
    same = run_fast(suite, task_weights={"task_0": 3.0, "task_1": 3.0}, **PLUS).model
    assert distance(same, plain) < 1e-9
    assert distance(run_fast(suite, task_weights={"task_0": 3.0}, **PLUS).model, plain) > 1e-4
