"""Distances of tasks from their experts, and weights of a second calibration by them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from calibrations import PLUS, assert_identical, assert_same, calls_of, run_fast
from model_types import suite_named
from process_group import in_processes
from tiny_models import Suite, clip_suite, decoder_suite
from torch import Tensor

from fusion_bench_featcal import CalibrationError, FeatCalSettings, Plus, SafetensorsExpert
from fusion_bench_featcal.experts import meta_copy
from fusion_bench_featcal.results.remarks import calibration_facts
from fusion_bench_featcal.run import balance
from fusion_bench_featcal.run.balance import MOST, balance_factors
from fusion_bench_featcal.run.log import distances

SUITES: dict[str, Callable[[], Suite]] = {
    "residual": partial(tiny.residual_suite, sizes=(6, 3)),
    "clip": partial(clip_suite, width=8, heads=2, tasks=3),
    "tower": partial(suite_named, "llava", "images"),  # which texts alone do not run
}


def run(suite: Suite, power: float = 1.0, **more: Any) -> Any:
    return run_fast(suite, **{**PLUS, "rule": Plus(balance=power), **more})


def last_features(model: Any, block: str, batches: list[Any]) -> Tensor:
    """Rows behind a block."""
    rows = list[Tensor]()
    for batch in batches:
        call = partial(model, **batch) if isinstance(batch, dict) else partial(model, batch)
        for _, output in calls_of(model, block, call):
            hidden = output[0] if isinstance(output, tuple) else output
            rows.append(hidden.reshape(-1, hidden.shape[-1]))
    return torch.cat(rows)


@pytest.mark.parametrize("name", ["residual"])
def test_the_distance_is_in_variances_of_one_direction(name: str) -> None:
    suite = SUITES[name]()
    result, block = run(suite, 0.0), suite.blocks[-1]
    for task, batches in suite.inputs.items():
        h, e = (last_features(m, block, batches) for m in (result.model, suite.experts[task]))
        variances = torch.linalg.eigvalsh(torch.cov(e.T, correction=0))
        one = variances.square().sum() / variances.sum()
        expected = float((h - e).square().sum(-1).mean() / one)
        assert distances(result.log.records)[task] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", SUITES)
def test_the_second_calibration_is_one_with_weights_by_the_distances(name: str) -> None:
    suite, own = SUITES[name](), {"task_1": 0.5}
    once = run(suite, 0.0, rule=Plus(task_weights=own))
    measured = distances(once.log.records)
    factors = balance_factors(measured, 0.7)
    assert max(factors.values()) > 1.01 > 0.99 > min(factors.values())
    weights = {task: own.get(task, 1.0) * factor for task, factor in factors.items()}
    expected = run(suite, 0.0, rule=Plus(task_weights=weights))
    result = run(suite, rule=Plus(balance=0.7, task_weights=own))
    assert_identical(result.model, expected.model)
    (record,) = result.log.select("balance")
    assert record == {"kind": "balance", "distances": measured, "factors": factors}
    assert len(result.log.select("trust")) == len(once.log.select("trust"))
    assert len(result.log.select("block")) == len(once.log.select("block"))


def test_larger_distances_have_larger_weights_within_bounds() -> None:
    factors = balance_factors({"a": 1.0, "b": 4.0, "c": 2.0, "equal": 0.0}, 0.5)
    assert factors == pytest.approx({"a": 0.5**0.5, "b": 2**0.5, "c": 1.0})
    far = balance_factors({"a": 1e-9, "b": 1.0}, 1.0)
    assert far == pytest.approx({"a": 1 / MOST, "b": MOST})
    assert balance_factors({}, 1.0) == {}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_have_the_same_weights(size: int) -> None:
    suite = SUITES["clip"]()
    expected = run(suite)
    for result in in_processes(size, lambda processes: run(suite, processes=processes)):
        assert_same(result.model, expected.model, 1e-9)
        (mine,), (other,) = (r.log.select("balance") for r in (result, expected))
        assert mine["factors"] == pytest.approx(other["factors"], rel=1e-8)


@pytest.mark.parametrize("name", ["residual", "tower"])
def test_a_resumed_run_keeps_its_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = SUITES[name]()
    folder: Any = {"checkpoint_dir": str(tmp_path), "resume": True}
    expected = run(suite, **folder)
    monkeypatch.setattr(balance, "NoCheckpoint", None)  # it is not measured again
    for number in reversed(range(len(expected.log.select("block")))):
        result = run(suite, **folder)
        assert_identical(result.model, expected.model)
        assert result.log.select("balance") == expected.log.select("balance")
        (tmp_path / f"block-{number:04}.safetensors").unlink()


def test_a_model_in_files_has_the_same_bits(tmp_path: Path) -> None:
    suite = decoder_suite()
    suite.merged.save_pretrained(tmp_path / "merged")  # type: ignore[operator]
    expected = run(suite)
    hollow = replace(suite, merged=meta_copy(suite.merged))
    source, folder = SafetensorsExpert(tmp_path / "merged"), str(tmp_path / "out")
    result = run(hollow, merged_weights=source, checkpoint_dir=folder)
    assert result.weights is not None
    for name, tensor in expected.model.state_dict().items():
        if name in result.weights.names():
            assert torch.equal(result.weights.tensor(name), tensor), name


def test_a_report_has_distances_and_weights() -> None:
    suite = SUITES["residual"]()
    settings = FeatCalSettings.plus(balance=1.0)
    result = run(suite)
    facts = calibration_facts("featcal_plus", settings, result.log.records, {})
    (record,) = result.log.select("balance")
    task_distances = distances(result.log.records)
    for task, distance in task_distances.items():
        assert facts.numbers[f"distance.{task}"] == distance
        assert facts.numbers[f"weight.{task}"] == record["factors"][task]
    assert facts.distances == task_distances


def test_the_papers_rule_has_no_balance() -> None:
    with pytest.raises(ValueError, match=r"balance=1.*no effect with the rule paper.*rule=plus"):
        _ = FeatCalSettings(balance=1.0).rule_object
    with pytest.raises(ValueError, match=r"balance must be a finite number >= 0"):
        Plus(balance=-1.0)
    with pytest.raises(CalibrationError, match="travel"):
        run(SUITES["residual"](), rule=Plus(balance=1.0, task_weights={"travel": 2.0}))
