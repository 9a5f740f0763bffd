"""The anchor alone is what calibration tends to, and touches what calibration would."""

import copy

import pytest
import torch
from calibrations import assert_identical, assert_same, replay, run_fast
from oracle import Knobs
from tiny_models import add_up, clip_suite, gpt2_suite, residual_suite

from fusion_bench_featcal.lab.rivals import AnchorOnly, AnchorOnlyAlgorithm


@pytest.mark.parametrize("make", [clip_suite, gpt2_suite, residual_suite])
@pytest.mark.parametrize("rho", [0.0, 0.5, 2.0])
def test_is_calibration_with_a_huge_lambda(make, rho: float) -> None:
    suite = make()
    method = AnchorOnly(anchor_rho=rho, family=replay(suite))
    limit = run_fast(suite, Knobs(eps=1e-8, lam=1e12, rho=rho), family=replay(suite))
    assert_same(method.anchored(suite.merged, suite.base), limit.model)


@pytest.mark.parametrize(
    "parts",
    [
        {"calibrate_bias": False},
        {"calibrate_norm": False},
        {"modules": ["!mlp.*"]},
        {"modules": ["q_proj"], "calibrate_bias": False},
    ],
)
def test_leaves_as_merged_what_calibration_leaves(parts) -> None:
    suite = clip_suite()
    limit = run_fast(suite, Knobs(eps=1e-8, lam=1e12), **parts)
    found = AnchorOnly(**parts).anchored(suite.merged, suite.base)
    assert_same(found, limit.model)
    merged = dict(suite.merged.named_parameters())
    for name, value in found.named_parameters():
        untouched = torch.equal(value, merged[name])
        assert untouched == torch.equal(dict(limit.model.named_parameters())[name], merged[name])


def test_rho_one_is_the_merged_model_and_it_is_not_changed() -> None:
    suite = residual_suite()
    before = copy.deepcopy(suite.merged)
    same, far = (AnchorOnly(anchor_rho=rho, family=replay(suite)) for rho in (1.0, 3.0))
    assert_identical(same.anchored(suite.merged, suite.base), suite.merged)
    far.anchored(suite.merged, suite.base)
    assert_identical(suite.merged, before)


def test_over_task_arithmetic_it_is_task_arithmetic_at_another_scale() -> None:
    suite = clip_suite()
    merged, twice = (add_up(suite.base, suite.experts, scale) for scale in (0.3, 0.6))
    found = AnchorOnly(anchor_rho=2.0).anchored(merged, suite.base)
    for name, value in found.named_parameters():
        wanted = twice if "encoder.layers" in name else merged
        torch.testing.assert_close(value, wanted.get_parameter(name))


def test_algorithm_is_the_method_over_the_upstream_merger() -> None:
    from fusion_bench_mergers import TASKS, FewSamplesPool

    base_method = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}
    pool = FewSamplesPool()
    found = AnchorOnlyAlgorithm(base_method=base_method, anchor_rho=2.0).run(pool)
    base, experts = pool.load_model("_pretrained_"), {t: pool.load_model(t) for t in TASKS}
    merged = add_up(base, experts, 0.3)
    assert_same(found, AnchorOnly().anchored(merged, base), bound=1e-5)
