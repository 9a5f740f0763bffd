"""What every calibration must satisfy, whatever the model: `calibrate` from the outside."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import (
    EXACT,
    PAPER,
    assert_identical,
    assert_same,
    distance,
    replay,
    run_fast,
    settings_of,
)
from oracle import Knobs
from tiny_decoders import decoder_suite
from tiny_models import Suite, clip_suite, gpt2_suite, residual_suite
from tiny_open_clip import tower_suite
from tiny_t5 import t5_suite
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError, FeatCalSettings, calibrate
from fusion_bench_featcal.families import resolve_family


def fingerprint(value: Any) -> str:
    """Hash of all numbers in a model or in nested inputs."""
    digest = hashlib.sha256()

    def feed(part: Any) -> None:
        if isinstance(part, nn.Module):
            feed(part.state_dict())
        elif isinstance(part, Mapping):
            for key in sorted(part):
                digest.update(str(key).encode())
                feed(part[key])
        elif isinstance(part, list | tuple):
            for entry in part:
                feed(entry)
        elif isinstance(part, Tensor):
            digest.update(
                str(part.dtype).encode()
                + part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )

    feed(value)
    return digest.hexdigest()


def with_models(suite: Suite, merged: nn.Module, experts: dict[str, nn.Module]) -> Suite:
    return Suite(merged, suite.base, experts, suite.inputs, suite.blocks)


def test_inputs_base_experts_and_merged_are_untouched():
    for suite, family in ((clip_suite(), "auto"), (gpt2_suite(), None)):
        everything = [suite.merged, suite.base, suite.experts, suite.inputs]
        before = [fingerprint(part) for part in everything]
        gradients = [p.requires_grad for p in suite.merged.parameters()]
        result = run_fast(suite, family=family or replay(suite))
        assert [fingerprint(part) for part in everything] == before
        assert fingerprint(result.model) != before[0]
        assert [p.requires_grad for p in result.model.parameters()] == gradients
        for model in (result.model, suite.merged, suite.base, *suite.experts.values()):
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        shared = {p.data_ptr() for p in suite.merged.parameters()}
        assert not shared & {p.data_ptr() for p in result.model.parameters()}


@pytest.mark.parametrize("training", [True, False])
def test_train_mode_is_kept_but_does_not_matter(training: bool):
    suite = residual_suite()
    wanted = run_fast(suite).model
    dropping = copy.copy(suite)
    dropping.merged = copy.deepcopy(suite.merged).train(training)
    found = run_fast(dropping).model
    assert found.training is training
    assert_identical(found, wanted)


def test_same_call_gives_the_same_bits():
    for suite, family in ((clip_suite(seed=1), "auto"), (residual_suite(seed=1), None)):
        first, second = (run_fast(suite, family=family or replay(suite)) for _ in range(2))
        assert_identical(first.model, second.model)


def test_replay_family_equals_the_clip_family():
    suite = clip_suite(seed=2, depth=3)
    assert_same(run_fast(suite).model, run_fast(suite).model)


NO_OP = [Knobs(), Knobs(alpha=1.0, lam=1e-3, rho=-1.0), Knobs(alpha=0.0, lam=3.0, rho=0.5)]


@pytest.mark.parametrize("knobs", NO_OP, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_expert_that_is_merged_and_base_moves_nothing(knobs: Knobs, dtype: torch.dtype):
    suite = clip_suite(tasks=1, seed=3).to(dtype)
    same = with_models(suite, suite.base, {"task_0": suite.base})
    # float32: the first block moves by an ulp, and lambda = 1e-3 lets the next one answer to that
    bound = EXACT if dtype is torch.float64 else 2e-5
    assert_same(run_fast(same, knobs).model, suite.base, bound)
    # the default eps moves weights by at most its share of eps + lambda
    shifted = run_fast(same, replace(knobs, eps=1e-4)).model
    assert distance(shifted, suite.base) <= 1e-4 / (1e-4 + knobs.lam) + bound


@pytest.mark.parametrize("rho", [2.0, 1.0, -0.5])
def test_infinite_ridge_gives_the_anchor(rho: float):
    suite = clip_suite(seed=4)
    found = dict(run_fast(suite, Knobs(lam=1e12, rho=rho)).model.named_parameters())
    merged, base = (dict(m.named_parameters()) for m in (suite.merged, suite.base))
    for name, value in found.items():
        inside = any(name.startswith(block) for block in suite.blocks)
        wanted = rho * merged[name] + (1 - rho) * base[name] if inside else merged[name]
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-8)


def test_order_of_tasks_does_not_matter():
    suite = clip_suite(seed=5)
    backwards = copy.copy(suite)
    backwards.experts = dict(reversed(suite.experts.items()))
    assert_same(run_fast(backwards).model, run_fast(suite).model)
    backwards.inputs = dict(reversed(suite.inputs.items()))
    assert_same(run_fast(backwards).model, run_fast(suite).model)


@pytest.mark.parametrize("sizes", [(7,), (1,) * 7, (2, 5), (3, 3, 1)], ids=str)
def test_batch_size_does_not_matter(sizes: tuple[int, ...]):
    wanted = run_fast(clip_suite(seed=6, sizes=(4, 3))).model
    assert_same(run_fast(clip_suite(seed=6, sizes=sizes)).model, wanted)


def test_samples_in_another_order_or_twice_do_not_matter():
    suite = residual_suite(seed=6)
    wanted = run_fast(suite).model
    turned = copy.copy(suite)
    turned.inputs = {task: [b.flip(0) for b in reversed(bs)] for task, bs in suite.inputs.items()}
    assert_same(run_fast(turned).model, wanted)
    doubled = copy.copy(suite)
    doubled.inputs = {task: [*bs, *bs] for task, bs in suite.inputs.items()}
    assert_same(run_fast(doubled).model, wanted)


class WeighsFirstTwice:
    """A family under which every position of a batch's first sample weighs 2."""

    def __init__(self, family: Any) -> None:
        self._family = family

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def row_weights(self, inputs: Any, stage_index: int, decoder_rows: str) -> Tensor:
        weights = torch.ones(len(inputs["pixel_values"]), 5)
        weights[0] = 2
        return weights


def test_sample_of_weight_two_is_a_sample_given_twice():
    suite = clip_suite(seed=9)
    doubled = copy.copy(suite)
    doubled.inputs = {
        task: [{"pixel_values": b["pixel_values"][[0, *range(len(b["pixel_values"]))]]} for b in bs]
        for task, bs in suite.inputs.items()
    }
    wanted = run_fast(doubled, samples_per_task=9).model
    assert_same(
        run_fast(suite, family=WeighsFirstTwice(resolve_family("clip", suite.merged))).model, wanted
    )
    assert distance(run_fast(suite).model, wanted) > 1e-4


def test_padding_changes_nothing():
    suite = gpt2_suite(padded=6, seed=7)
    wanted = run_fast(suite).model
    assert_same(run_fast(gpt2_suite(padded=11, seed=7)).model, wanted)
    scribbled = copy.deepcopy(suite)
    for batches in scribbled.inputs.values():
        for batch in batches:
            batch["input_ids"][batch["attention_mask"] == 0] = 17
    assert_same(run_fast(scribbled).model, wanted)
    unmasked = copy.deepcopy(suite)
    unmasked.inputs = {
        task: [{"input_ids": batch["input_ids"]} for batch in batches]
        for task, batches in suite.inputs.items()
    }
    assert distance(run_fast(unmasked).model, wanted) > 1e-3


def test_only_the_samples_asked_for_are_drawn():
    suite = clip_suite(seed=11, sizes=(2, 2, 2, 2))
    drawn: list[str] = []

    def stream(task: str) -> Iterator[Any]:
        for batch in suite.inputs[task]:
            drawn.append(task)
            yield batch

    settings = settings_of(PAPER, suite, samples_per_task=3)
    found = calibrate(
        suite.merged,
        suite.base,
        suite.experts,
        {task: stream(task) for task in suite.inputs},
        settings,
        progress=False,
    )
    assert {task: drawn.count(task) for task in drawn} == dict.fromkeys(suite.inputs, 2)
    short = copy.copy(suite)
    short.inputs = {
        task: [{"pixel_values": torch.cat([b["pixel_values"] for b in batches])[:3]}]
        for task, batches in suite.inputs.items()
    }
    assert_same(found.model, run_fast(short).model)
    assert {r["samples"] for r in found.log.records if r["kind"] == "task"} == {3}


def test_expert_features_are_not_computed_where_nothing_uses_them():
    suite = clip_suite(seed=13)
    knobs = Knobs(alpha=0.0)
    silent = run_fast(suite, knobs, log_drift=False)
    assert_same(silent.model, run_fast(suite, knobs).model)
    record = next(r for r in silent.log.records if r["kind"] == "task")
    assert record["drift_before"] is None
    assert record["drift_after"] is None


@pytest.mark.parametrize("make", [clip_suite, gpt2_suite, t5_suite, tower_suite, decoder_suite])
def test_passes_that_end_early_without_the_drift_log_change_no_bit(make: Callable[[], Suite]):
    suite = make().to(torch.float32)
    family = replay(suite) if make is gpt2_suite else "auto"
    knobs = replace(PAPER, norm=make in (clip_suite, gpt2_suite, tower_suite))
    logged, silent = (run_fast(suite, knobs, family, log_drift=log) for log in (True, False))
    assert_identical(silent.model, logged.model)
    rows = [[r["rows"] for r in run.log.records if r["kind"] == "task"] for run in (logged, silent)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("make", [clip_suite, tower_suite])
def test_in_place_gives_the_same_model_without_a_copy(make: Callable[[], Suite]):
    suite = make()
    wanted = run_fast(suite).model
    merged = copy.deepcopy(suite.merged).train()
    result = calibrate(
        merged, suite.base, suite.experts, suite.inputs, settings_of(PAPER, suite), in_place=True
    )
    assert_identical(result.model, wanted)
    assert result.model.training
    assert all(parameter.requires_grad for parameter in result.model.parameters())
    if make is clip_suite:  # open_clip's fused attention is put together anew
        assert result.model is merged


def test_in_place_refuses_to_change_the_base_or_an_expert():
    suite = clip_suite()
    settings = settings_of(PAPER, suite)
    for base, experts in (
        (suite.merged, suite.experts),
        (suite.base, suite.experts | dict.fromkeys(list(suite.experts)[:1], suite.merged)),
    ):
        with pytest.raises(ValueError, match="in_place needs a merged model that is neither"):
            calibrate(suite.merged, base, experts, suite.inputs, settings, in_place=True)
    limited = settings_of(PAPER, suite, expert_read_budget="50%")
    with pytest.raises(ValueError, match=r"in_place uses up .*method\.expert_read_budget"):
        calibrate(suite.merged, suite.base, suite.experts, suite.inputs, limited, in_place=True)


def test_a_failed_run_gives_the_modes_back():
    suite = clip_suite()
    merged = copy.deepcopy(suite.merged).train()
    spoilt = suite.inputs | {"task_0": [{"pixel_values": torch.full((7, 3, 8, 8), torch.nan)}]}
    with pytest.raises(CalibrationError, match="NaN"):
        calibrate(
            merged, suite.base, suite.experts, spoilt, settings_of(PAPER, suite), in_place=True
        )
    assert merged.training
    assert all(parameter.requires_grad for parameter in merged.parameters())


def test_whole_numbers_are_as_good_as_fractions():
    suite = residual_suite(seed=14)
    whole: dict[str, Any] = {"ridge_lambda": 1, "mix_alpha": 1, "anchor_rho": 2, "eps": 0}
    family = replay(suite)
    fractions: dict[str, Any] = {name: float(value) for name, value in whole.items()}
    found = run_fast(suite, family=family, **whole).model
    wanted = run_fast(suite, family=family, **fractions).model
    assert_identical(found, wanted)
    alone: dict[str, Any] = {**whole, "anchor_rho": 1}
    assert run_fast(suite, family=family, has_base=False, **alone).model is not None


def test_calibration_lowers_the_final_drift():
    suite = clip_suite(seed=18, depth=3, sizes=(32,))
    records = run_fast(suite, Knobs(alpha=0.3, lam=0.05, rho=1.0)).log.records
    last = [r for r in records if r["kind"] == "task" and r["block"] == suite.blocks[-1]]
    assert all(r["relative_drift_after"] < r["relative_drift_before"] for r in last)


def test_settings_name_their_family():
    suite = residual_suite(seed=19)
    settings = settings_of(PAPER, suite)
    assert isinstance(settings, FeatCalSettings)
    found = calibrate(
        suite.merged, suite.base, suite.experts, suite.inputs, settings, progress=False
    )
    assert_identical(found.model, run_fast(suite).model)
