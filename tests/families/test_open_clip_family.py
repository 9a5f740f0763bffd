"""open_clip's fused attention: divided, calibrated and fused again."""

from functools import partial
from typing import Any

import pytest
from calibrations import PAPER, PLUS, assert_same, distance, run_fast
from oracle import Knobs
from tiny_models import Suite, clip_suite
from tiny_open_clip import Tower, TwoTowers, converted
from torch import nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.open_clip import split


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
    with pytest.raises(ValueError, match=r"auto does not support TwoTowers.*a family"):
        resolve_family("auto", TwoTowers(nn.Identity()))
