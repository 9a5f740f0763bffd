"""Below lambda 0.01 the package is as exact as its float32 features allow."""

import pytest
import torch
from calibrations import assert_same, distance, run_fast
from small_lambda import ALLOWED, CASES, SMALL
from tiny_models import clip_suite

# One family of each arrangement; test-newest runs all of them.
EACH_TIME = ("clip, 1 image a task", "open_clip", "t5", "llama", "gpt2 (replay)")
NAMES = [n if n in EACH_TIME else pytest.param(n, marks=pytest.mark.slow) for n in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_errors_stay_within_four_times_those_of_float32_features(name: str):
    errors = CASES[name].errors(seed=1)
    assert errors.package <= ALLOWED * errors.at_best, errors
    assert errors.package < 1e-4


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_sums_too_coarse_for_lambda_are_warned_of(precision: str, caplog: pytest.LogCaptureFixture):
    suite = clip_suite(seed=1).to(torch.float32)
    run_fast(suite, sums_precision=precision)  # lambda 0.05
    assert "too coarse" not in caplog.text
    run_fast(suite, SMALL, sums_precision=precision)
    assert caplog.text.count("too coarse") == 1
    assert f"method.sums_precision={precision} is too coarse for method.ridge_" in caplog.text


def test_rank_deficient_systems_are_solved_if_float64_can():
    suite = clip_suite(seed=3, sizes=(1,), tasks=1, width=24).to(torch.float32)
    for ridge_lambda in (1e-8, 1e-10):
        model = run_fast(suite, SMALL, ridge_lambda=ridge_lambda, eps=0.0).model
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_float64_sums_may_be_asked_for_at_any_lambda():
    suite = clip_suite(seed=4).to(torch.float32)
    exact, plain = run_fast(suite, sums_precision="float64").model, run_fast(suite).model
    assert distance(exact, plain) > 0
    assert_same(exact, plain, 1e-3)
