"""The closed-form mergers and the anchor on model families beyond CLIP."""

import copy
from typing import Any

import pytest
import torch
from calibrations import samples_in
from tiny_models import Suite, add_up, clip_model, normal, scatter
from tiny_open_clip import converted
from tiny_t5 import t5_suite
from torch import nn

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.methods.anchor_only import anchor_only
from fusion_bench_featcal.methods.lot import lot
from fusion_bench_featcal.methods.regmean import regmean
from fusion_bench_featcal.methods.regmean_plusplus import regmean_plusplus

MERGERS = pytest.mark.parametrize("merge", [regmean, regmean_plusplus, lot])


def merged_by(merge: Any, suite: Suite) -> nn.Module:
    settings = FeatCalSettings(samples_per_task=samples_in(suite))
    return merge(suite.base, suite.experts, suite.inputs, settings, progress=False)


def two_arrangements() -> tuple[Suite, Suite]:
    """The same models as transformers' vision towers, and as open_clip's with fused attention."""
    base = scatter(clip_model(seed=0).double(), 0, 0.15)
    experts = {f"task_{i}": scatter(base, i, 0.1) for i in (1, 2)}
    config: Any = base.config
    inputs = {
        task: [normal(i, 6, 3, config.image_size, config.image_size)]
        for i, task in enumerate(experts)
    }
    plain = Suite(add_up(base, experts, 0.4), base, experts, inputs, [])
    towers = {task: converted(expert) for task, expert in experts.items()}
    fused = Suite(converted(plain.merged), converted(base), towers, inputs, [])
    return plain, fused


def assert_same_towers(found: nn.Module, plain: nn.Module) -> None:
    wanted = converted(plain).state_dict()
    assert list(found.state_dict()) == list(wanted)
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-8)


@MERGERS
def test_fused_attention_merges_as_its_parts_would(merge: Any) -> None:
    plain, fused = two_arrangements()
    before = copy.deepcopy(fused.base.state_dict())
    assert_same_towers(merged_by(merge, fused), merged_by(merge, plain))
    assert all(torch.equal(value, before[n]) for n, value in fused.base.state_dict().items())


def test_anchor_of_fused_attention_is_that_of_its_parts() -> None:
    plain, fused = two_arrangements()
    settings = FeatCalSettings(anchor_rho=2.0)
    found = anchor_only(fused.merged, fused.base, settings)
    assert_same_towers(found, anchor_only(plain.merged, plain.base, settings))


@MERGERS
def test_experts_that_agree_are_what_t5_merges_to(merge: Any) -> None:
    suite = t5_suite()
    suite.experts.update(dict.fromkeys(suite.experts, suite.experts["task_0"]))
    wanted = suite.experts["task_0"].state_dict()
    # float32 softmax and norms inside of T5; a direction that few rows reach stays as it is
    for name, value in merged_by(merge, suite).state_dict().items():
        if merge is not lot:
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
        assert bool(torch.isfinite(value).all())
