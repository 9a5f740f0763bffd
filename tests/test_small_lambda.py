"""Below lambda 0.01 the package is as exact as its float32 features allow."""

import pytest
import torch
from calibrations import run_fast
from small_lambda import ALLOWED, CASES, SMALL
from tiny_models import clip_suite

# One family of each arrangement; test-newest runs all of them.
EACH_TIME = ("clip, 1 image a task", "llama", "gpt2 (replay)")
NAMES = [n if n in EACH_TIME else pytest.param(n, marks=pytest.mark.slow) for n in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_errors_stay_within_four_times_those_of_float32_features(name: str):
    errors = CASES[name].errors(seed=1)
    assert errors.package <= ALLOWED * errors.at_best, errors
    assert errors.package < 1e-4


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_sums_too_coarse_for_lambda_are_warned_of(precision: str, caplog: pytest.LogCaptureFixture):
    suite = clip_suite(seed=1).to(torch.float32)
    run_fast(suite, sums_precision=precision)  # lambda 0.05
    assert "too coarse" not in caplog.text
    run_fast(suite, SMALL, sums_precision=precision)
    assert caplog.text.count("too coarse") == 1
    assert f"method.sums_precision={precision} is too coarse for method.ridge_" in caplog.text
