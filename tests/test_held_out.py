"""Held-out samples measure a model. Tasks that stay far are calibrated a second time."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrations import EXACT, PLUS, assert_identical, cast, distance, run_fast, samples_in
from oracle import record
from tiny_models import Suite, clip_suite, decoder_suite, residual_suite, scatter, t5_suite
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from tricky_models import biased, stack_suite
from variations import parted

from fusion_bench_featcal import CalibrationError, CalibrationLog, FeatCalSettings
from fusion_bench_featcal.agreement import Agreement, calibrate_and_compare, outcome_of, warnings_of
from fusion_bench_featcal.problem import Request
from fusion_bench_featcal.streams import Batch
from fusion_bench_featcal.streams.samples import hold_out

CASES: dict[str, tuple[Callable[[], Suite], dict[str, Any]]] = {
    "clip": (lambda: clip_suite(tasks=2, sizes=(4, 3, 2)), {}),
    "llama": (lambda: decoder_suite("llama", seed=1), {"decoder_rows": "targets"}),
    "t5": (lambda: t5_suite(seed=1, depths=(1, 1)), PLUS),
    "residual": (lambda: residual_suite(sizes=(4, 3)), PLUS),
}


def final_rows(suite: Suite, model: nn.Module, name: str, batches: Sequence[Any]) -> Tensor:
    """Features behind the last block at the positions that the head reads."""
    last, rows = suite.blocks[-1], []
    for inputs, features in zip(batches, record(model, batches, [], [last])[1][last], strict=True):
        if name == "clip":
            rows.append(features[:, 0])
        elif name == "llama":
            rows.append(features[:, :-1][inputs["labels"][:, 1:] >= 0])
        elif name == "t5":
            rows.append(features[inputs["labels"] >= 0])
        else:
            rows.append(features.flatten(0, -2))
    return torch.cat(rows).double()


@pytest.mark.parametrize("name", CASES)
def test_other_samples_make_the_model_and_agreement_is_that_of_whole_models(name: str):
    make, more = CASES[name]
    suite = make()
    used, last = parted(suite, 3)
    result = run_fast(suite, held_out=3, samples_per_task=samples_in(suite), **more)
    assert_identical(result.model, run_fast(used, samples_per_task=9, **more).model)
    for task, expert in suite.experts.items():
        batches = cast(last.inputs, torch.float64)[task]
        expected = final_rows(suite, expert, name, batches)
        records = [r for r in result.log.of_kind("task") if r["task"] == task]
        for model, end in ((suite.merged, "_merged"), (result.model, "")):
            rows = final_rows(suite, model, name, batches)
            cosine = float(cosine_similarity(rows, expected).mean())
            drift = float((rows - expected).norm() / expected.norm())
            assert records[-1]["held_out"] == 3
            assert records[-1][f"held_out_cosine{end}"] == pytest.approx(cosine, abs=EXACT)
            assert records[-1][f"held_out_drift{end}"] == pytest.approx(drift, rel=EXACT)
        merged = [r["held_out_drift_merged"] for r in records]
        assert len(merged) == len(suite.blocks) and min(merged) > 0


def test_parts_of_batches_have_their_first_sample():
    batches = [Batch(torch.arange(start, start + 16), 16, start) for start in (0, 16, 32)]
    dealt = [(b.start, b.samples, b.is_held_out) for b in hold_out(batches, 21)]
    assert dealt == [(0, 16, False), (16, 5, False), (21, 11, True), (32, 16, True)]


@pytest.mark.parametrize(("samples", "number"), [(15, 0), (16, 2), (999, 32)])
def test_auto_holds_out_one_of_eight(samples: int, number: int):
    tasks = run_fast(stack_suite(biased, sizes=(samples,)), held_out="auto").log.of_kind("task")
    assert {record.get("held_out", 0) for record in tasks} == {number}


def test_strict_refuses_a_model_that_is_no_closer_to_an_expert():
    suite = stack_suite(biased, tasks=1, sizes=(20, 17), seed=3)
    strict: dict[str, Any] = {**PLUS, "held_out": 5, "strict": True}
    assert_identical(run_fast(suite, **strict).model, run_fast(suite, held_out=5, **PLUS).model)
    already = replace(suite, experts=dict.fromkeys(suite.experts, suite.merged))
    with pytest.raises(CalibrationError, match=r"no closer to .*: task_0 \(cosine .*strict"):
        run_fast(already, **strict)


DRIFT: dict[str, Any] = {**PLUS, "held_out": 2, "task_weights": "drift"}
Outcome = Mapping[str, tuple[float, float]]
"""By task: cosine and drift on held-out samples. The merged model's cosine is 0.5."""
EVEN: Outcome = dict.fromkeys("abc", (0.9, 0.1))
FAR: Outcome = EVEN | {"c": (0.6, 0.4)}
BEHIND: Outcome = EVEN | {"c": (0.4, 0.4)}
CLOSER: Outcome = dict.fromkeys("abc", (0.97, 0.1))


def result_of(outcome: Outcome) -> Any:
    log = CalibrationLog()
    for task, (cosine, drift) in outcome.items():
        for block in ("first", "last"):  # the last block's record counts
            values = {"held_out": 2, "held_out_drift": drift, "held_out_cosine_merged": 0.5}
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
    best, (first, second) = compared(FAR, CLOSER, checkpoint_dir="here")
    assert (first.task_weights, first.checkpoint_dir) == (None, "here")
    assert second.task_weights == pytest.approx({"a": 0.5, "b": 0.5, "c": 2.0})
    assert second.checkpoint_dir == "here/drift_weights"
    assert best.reads["totals"]["experts_read"] == 20  # of both
    (line,) = outcome_of(best.log)
    assert "c 2.00" in line and "kept" in line and "0.9700, before 0.8000" in line
    assert outcome_of(CalibrationLog()) == []


@pytest.mark.parametrize("second", [CLOSER | {"c": (0.5, 0.1)}, FAR])
def test_a_second_calibration_that_helps_less_is_dropped(second: Outcome):
    best, _ = compared(FAR, second)
    assert "dropped" in outcome_of(best.log)[0]
    assert Agreement.of(best.log).mean == pytest.approx(0.8)


@pytest.mark.parametrize(("first", "weights"), [(EVEN, "drift"), (FAR, {"c": 2.0}), ({}, "drift")])
def test_one_calibration_if_drift_is_even_or_weights_are_given(first: Outcome, weights: Any):
    _, calls = compared(first, task_weights=weights)
    assert [call.task_weights for call in calls] == [None if weights == "drift" else weights]


def test_a_task_that_is_farther_than_before_is_named_with_advice():
    plus = FeatCalSettings(**DRIFT)
    paper = plus.replace(rule="paper", task_weights=None)
    assert warnings_of(Agreement.of(result_of(FAR).log), plus) == []
    for settings, advice in ((plus, "other samples"), (paper, "FeatCal+ (method=featcal/plus)")):
        (line,) = warnings_of(Agreement.of(result_of(BEHIND).log), settings)
        assert "c (cosine 0.4000, merged 0.5000)" in line and line.count("cosine") == 1
        assert f"{advice}, or leaving their experts out" in line


def test_the_model_is_that_of_its_weights_and_is_resumed(tmp_path: Path):
    settings: Any = DRIFT | {"held_out": 8}
    suite, folder = residual_suite(tasks=3, sizes=(24, 12), seed=3), tmp_path / "blocks"
    suite.experts["task_2"] = scatter(suite.experts["task_2"], 5, 0.2)  # so that drift is uneven
    result = run_fast(suite, checkpoint_dir=str(folder), **settings)
    (record,) = result.log.of_kind("drift_weights")
    weights = record["weights"] if record["kept"] else {}
    alone = run_fast(suite, **settings | {"task_weights": weights})
    assert_identical(result.model, alone.model)
    json.dumps(result.log.plain_records())
    assert (folder / "drift_weights").is_dir()
    again = run_fast(suite, checkpoint_dir=str(folder), resume=True, **settings)
    assert_identical(again.model, result.model)
    assert again.log.of_kind("resumed")


def test_only_the_ratio_of_task_weights_matters():
    suite = residual_suite()
    plain = run_fast(suite, **PLUS).model
    tripled = run_fast(suite, task_weights={"task_0": 3.0, "task_1": 3.0}, **PLUS).model
    assert distance(tripled, plain) < 1e-9
    assert distance(run_fast(suite, task_weights={"task_0": 3.0}, **PLUS).model, plain) > 1e-4
