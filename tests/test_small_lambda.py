"""Below lambda 0.01 the package is as exact as its float32 features allow."""

import pytest
import torch
from calibrations import run_fast
from small_lambda import ALLOWED, CASES, QUICK, SMALL, errors_of
from tiny_models import clip_suite

TABLE = [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES]


@pytest.mark.parametrize("name", TABLE)
def test_errors_stay_within_four_times_those_of_float32_features(name: str):
    errors = errors_of(CASES[name], seed=1)
    assert errors.package <= ALLOWED * errors.at_best, errors
    assert errors.package < 1e-4


def test_sums_too_coarse_for_lambda_are_warned_of(caplog: pytest.LogCaptureFixture):
    suite = clip_suite(seed=1).to(torch.float32)
    run_fast(suite, sums_precision="float32")  # lambda 0.05
    assert "too coarse" not in caplog.text
    run_fast(suite, SMALL, sums_precision="float32")
    assert caplog.text.count("too coarse") == 1
    assert "method.sums_precision=float32 is too coarse for method.ridge_" in caplog.text
