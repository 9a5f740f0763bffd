"""What every calibration must satisfy, whatever the model: `calibrate` from the outside."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import (
    EXACT,
    PAPER,
    PLUS,
    assert_identical,
    assert_same,
    distance,
    replay,
    run_fast,
    settings_of,
)
from oracle import Knobs
from tiny_models import Suite, clip_suite, decoder_suite, gpt2_suite, residual_suite, t5_suite
from tiny_open_clip import tower_suite
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError, calibrate
from fusion_bench_featcal.families import resolve_family


def tensors_of(suite: Suite) -> list[Tensor]:
    """All tensors of a suite's models and inputs."""
    models = (suite.merged, suite.base, *suite.experts.values())
    tensors = [tensor for model in models for tensor in model.state_dict().values()]
    batches = [batch for task in suite.inputs.values() for batch in task]
    return tensors + [value for batch in batches for value in batch.values()]


@pytest.mark.parametrize("make", [clip_suite, gpt2_suite])
def test_inputs_base_experts_and_merged_are_untouched(make: Callable[[], Suite]):
    suite = make()
    before = [tensor.clone() for tensor in tensors_of(suite)]
    gradients = [p.requires_grad for p in suite.merged.parameters()]
    model = run_fast(suite).model
    assert all(map(torch.equal, tensors_of(suite), before))
    assert distance(model, suite.merged) > 1e-3
    assert [p.requires_grad for p in model.parameters()] == gradients
    for each in (model, suite.merged, suite.base, *suite.experts.values()):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in each.modules())
    shared = {p.data_ptr() for p in suite.merged.parameters()}
    assert not shared & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("training", [True, False])
def test_train_mode_is_kept_but_does_not_matter(training: bool):
    suite = residual_suite()
    wanted = run_fast(suite).model
    dropping = replace(suite, merged=copy.deepcopy(suite.merged).train(training))
    found = run_fast(dropping).model
    assert found.training is training
    assert_identical(found, wanted)


def test_replay_family_equals_the_clip_family():
    suite = clip_suite(seed=2, depth=3)
    assert_same(run_fast(suite, family=replay(suite)).model, run_fast(suite).model)


NO_OP = [Knobs(), Knobs(alpha=1.0, lam=1e-3, rho=-1.0), Knobs(alpha=0.0, lam=3.0, rho=0.5)]


@pytest.mark.parametrize("knobs", NO_OP, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_expert_that_is_merged_and_base_moves_nothing(knobs: Knobs, dtype: torch.dtype):
    suite = clip_suite(tasks=1, seed=3).to(dtype)
    same = replace(suite, merged=suite.base, experts={"task_0": suite.base})
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
    backwards = replace(suite, experts=dict(reversed(suite.experts.items())))
    assert_same(run_fast(backwards).model, run_fast(suite).model)
    backwards.inputs = dict(reversed(suite.inputs.items()))
    assert_same(run_fast(backwards).model, run_fast(suite).model)


@pytest.mark.parametrize("sizes", [(7,), (1,) * 7], ids=str)
def test_batch_size_does_not_matter(sizes: tuple[int, ...]):
    wanted = run_fast(clip_suite(seed=6, sizes=(4, 3))).model
    assert_same(run_fast(clip_suite(seed=6, sizes=sizes)).model, wanted)


def test_samples_in_another_order_or_twice_do_not_matter():
    suite = residual_suite(seed=6)
    wanted = run_fast(suite).model
    turned = {task: [b.flip(0) for b in reversed(bs)] for task, bs in suite.inputs.items()}
    assert_same(run_fast(replace(suite, inputs=turned)).model, wanted)
    doubled = {task: [*bs, *bs] for task, bs in suite.inputs.items()}
    assert_same(run_fast(replace(suite, inputs=doubled)).model, wanted)


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
    doubled = {
        task: [{"pixel_values": b["pixel_values"][[0, *range(len(b["pixel_values"]))]]} for b in bs]
        for task, bs in suite.inputs.items()
    }
    wanted = run_fast(replace(suite, inputs=doubled)).model
    weighing = WeighsFirstTwice(resolve_family("clip", suite.merged))
    assert_same(run_fast(suite, family=weighing).model, wanted)
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
    for batches in scribbled.inputs.values():
        for batch in batches:
            del batch["attention_mask"]
    assert distance(run_fast(scribbled).model, wanted) > 1e-3


def test_only_the_samples_asked_for_are_drawn():
    suite = clip_suite(seed=11, sizes=(2, 2, 2, 2))
    drawn: list[str] = []

    def stream(task: str) -> Iterator[Any]:
        for batch in suite.inputs[task]:
            drawn.append(task)
            yield batch

    streams: Any = {task: stream(task) for task in suite.inputs}
    found = run_fast(replace(suite, inputs=streams), samples_per_task=3)
    assert {task: drawn.count(task) for task in drawn} == dict.fromkeys(suite.inputs, 2)
    short: dict[str, list] = {
        task: [{"pixel_values": torch.cat([b["pixel_values"] for b in batches])[:3]}]
        for task, batches in suite.inputs.items()
    }
    assert_same(found.model, run_fast(replace(suite, inputs=short)).model)
    assert {r["samples"] for r in found.log.records if r["kind"] == "task"} == {3}


@pytest.mark.parametrize(
    ("make", "alpha"),
    [(clip_suite, 0), (gpt2_suite, 1), (t5_suite, 1), (tower_suite, 1), (decoder_suite, 1)],
)
def test_passes_that_end_early_without_the_drift_log_change_no_bit(
    make: Callable[[], Suite], alpha: float
):
    suite = make().to(torch.float32)
    knobs = replace(PAPER, norm=make in (clip_suite, gpt2_suite, tower_suite), alpha=alpha)
    logged, silent = (run_fast(suite, knobs, log_drift=log) for log in (True, False))
    assert_identical(silent.model, logged.model)
    assert all("drift_after" not in record for record in silent.log.of_kind("task"))


def test_passes_whose_output_nobody_needs_end_with_the_last_input():
    suite, counts, ended = clip_suite(sizes=(1,) * 7), [], []
    last = suite.merged.get_submodule(f"{suite.blocks[-1]}.mlp.fc2")
    last.register_forward_hook(lambda *_: ended.append(1))
    for log_drift in (True, False):
        run_fast(suite, log_drift=log_drift)
        counts.append(len(ended) - sum(counts))
    # the first batch of a task tells which input is the last
    assert counts[0] - counts[1] >= 6 * len(suite.experts)


def test_a_failed_run_gives_the_modes_back():
    suite = clip_suite()
    merged = copy.deepcopy(suite.merged).train()
    spoilt = suite.inputs | {"task_0": [{"pixel_values": torch.full((7, 3, 8, 8), torch.nan)}]}
    with pytest.raises(CalibrationError, match="NaN"):
        run_fast(replace(suite, merged=merged, inputs=spoilt))
    assert merged.training
    assert all(parameter.requires_grad for parameter in merged.parameters())


def test_calibration_lowers_the_final_drift():
    suite = clip_suite(seed=18, depth=3, sizes=(32,))
    records = run_fast(suite, Knobs(alpha=0.3, lam=0.05, rho=1.0)).log.of_kind("task")
    names = ("relative_drift_after", "relative_drift_before")
    for block in suite.blocks:
        found = [[r[name] for name in names] for r in records if r["block"] == block]
        if block == suite.blocks[-1]:  # of the class token alone, of which a task may lose a little
            found = [[sum(side) for side in zip(*found, strict=True)]]
        assert all(after < before for after, before in found)


def class_tokens(model: nn.Module, batches: list[Any]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(**batch).last_hidden_state[:, 0] for batch in batches])


@pytest.mark.parametrize("settings", [{}, PLUS], ids=["paper", "plus"])
def test_drift_behind_the_last_block_is_that_of_tokens_that_are_read(settings: dict[str, Any]):
    suite = clip_suite(seed=3)
    result = run_fast(suite, **settings)
    for record in result.log.of_kind("task")[-len(suite.experts) :]:
        batches = suite.inputs[record["task"]]
        expert = class_tokens(suite.experts[record["task"]], batches)
        squares = (class_tokens(result.model, batches) - expert).square().sum()
        wanted = float((squares / expert.square().sum()).sqrt())
        assert record["relative_drift_after"] == pytest.approx(wanted, rel=1e-6)


def test_settings_name_their_family():
    suite = residual_suite(seed=19)
    settings = settings_of(PAPER, suite, family=suite.family)
    found = calibrate(
        suite.merged, suite.base, suite.experts, suite.inputs, settings, progress=False
    )
    assert_identical(found.model, run_fast(suite).model)
