"""open_clip's fused attention taken apart, calibrated, and put together again."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from calibrations import PAPER, PLUS, assert_identical, assert_same, distance, run_fast
from oracle import Knobs
from tiny_models import Suite, clip_suite, normal
from tiny_open_clip import Tower, TwoTowers, converted, tower_suite
from torch import nn

from fusion_bench_featcal import CalibrationError, InMemoryExpert
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.open_clip import fused, split


@pytest.mark.parametrize(("quick", "batch_first"), [(True, True), (False, False)])
def test_a_split_model_is_the_same_function(quick, batch_first):
    model = tower_suite(seed=1, quick=quick, batch_first=batch_first).merged
    pixels = normal(0, 3, 3, 8, 8)
    divided = split(model)
    torch.testing.assert_close(divided(pixels), model(pixels))
    assert not any(isinstance(module, nn.MultiheadAttention) for module in divided.modules())
    restored = fused(copy.deepcopy(divided))
    assert_identical(restored, model)
    assert torch.equal(restored(pixels), model(pixels))
    assert str(restored) == str(model)
    assert list(restored.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize(
    ("batch_first", "knobs", "more"),
    [(True, Knobs(alpha=1.0, lam=1e-3, rho=2.2), {}), (False, PAPER, PLUS)],
    ids=["paper", "plus"],
)
def test_open_clip_calibrates_and_drifts_as_its_transformers_twin(knobs, more, batch_first):
    twin = clip_suite(seed=4, tasks=2)
    convert = partial(converted, batch_first=batch_first)
    experts = {task: convert(expert) for task, expert in twin.experts.items()}
    suite = Suite(convert(twin.merged), convert(twin.base), experts, twin.inputs, [])
    expected, result = (run_fast(s, knobs, **more) for s in (twin, suite))
    assert distance(result.model, suite.merged) > 1e-3
    assert_same(result.model, convert(expected.model))
    assert type(result.model) is Tower and str(result.model) == str(suite.merged)
    for visit, other in zip(result.log.of_kind("task"), expected.log.of_kind("task"), strict=True):
        assert (visit["task"], visit["rows"]) == (other["task"], other["rows"])
        assert more or visit["drift"] == pytest.approx(other["drift"], rel=1e-9)


def with_attention(attention: nn.Module) -> nn.Module:
    model = Tower()
    model.transformer.resblocks[1].attn = attention
    return model


def without_switch() -> nn.Module:
    model = Tower(batch_first=False)
    del model.transformer.batch_first
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split(with_attention(nn.MultiheadAttention(12, 3, add_bias_kv=True))),
         r"\.1\.attn is a .*cannot be split"),
        (lambda: split(without_switch()), r"batch in second place.*open_clip_torch 2\.26"),
        (lambda: run_fast(
            tower_suite(), merged_weights=InMemoryExpert(Tower()), checkpoint_dir="x"),
         r"open_clip model is calibrated in memory"),
        (lambda: run_fast(replace(tower_suite(), base=InMemoryExpert(Tower()))),
         r"open_clip model is calibrated in memory: load"),
        (lambda: resolve_family("auto", TwoTowers(nn.Identity())),
         r"auto does not know TwoTowers.*a family"),
    ],
)  # fmt: skip
def test_models_that_are_no_open_clip_are_refused(call, message):
    with pytest.raises((CalibrationError, ValueError), match=message):
        call()
