"""open_clip's fused attention: divided, calibrated and fused again."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from calibrations import PAPER, PLUS, assert_identical, assert_same, distance, run_fast
from oracle import Knobs
from tiny_models import Suite, clip_suite, normal
from tiny_open_clip import Tower, TwoTowers, converted, tower_suite
from torch import nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.open_clip import fused, split


@pytest.mark.parametrize(("quick", "batch_first"), [(True, True), (False, False)])
def test_a_divided_model_is_the_same_function(quick: bool, batch_first: bool):
    model = tower_suite(seed=1, quick=quick, batch_first=batch_first).merged
    divided, pixels = split(model), normal(0, 3, 3, 8, 8)
    torch.testing.assert_close(divided(pixels), model(pixels))
    assert not any(isinstance(module, nn.MultiheadAttention) for module in divided.modules())
    restored = fused(copy.deepcopy(divided))
    assert_identical(restored, model)
    assert torch.equal(restored(pixels), model(pixels))
    assert list(restored.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize(
    ("batch_first", "knobs", "more"),
    [(True, Knobs(alpha=1.0, lam=1e-3, rho=2.2), {}), (False, PAPER, PLUS)],
    ids=["paper", "plus"],
)
def test_open_clip_is_calibrated_as_the_same_model_of_transformers(knobs, more, batch_first):
    twin = clip_suite(seed=4, tasks=2)
    convert = partial(converted, batch_first=batch_first)
    experts = {task: convert(expert) for task, expert in twin.experts.items()}
    suite = Suite(convert(twin.merged), convert(twin.base), experts, twin.inputs, [])
    expected, result = (run_fast(s, knobs, **more) for s in (twin, suite))
    assert distance(result.model, suite.merged) > 1e-3
    assert_same(result.model, convert(expected.model))
    assert type(result.model) is Tower and str(result.model) == str(suite.merged)


def with_bias_of_keys() -> nn.Module:
    model: Any = Tower()
    model.transformer.resblocks[1].attn = nn.MultiheadAttention(12, 3, add_bias_kv=True)
    return model


def test_models_that_cannot_be_divided_are_refused():
    with pytest.raises(CalibrationError, match=r"\.1\.attn is a .*cannot be split"):
        split(with_bias_of_keys())
    with pytest.raises(ValueError, match=r"auto does not know TwoTowers.*a family"):
        resolve_family("auto", TwoTowers(nn.Identity()))
