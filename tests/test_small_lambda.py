"""Below lambda 0.01 the package is as exact as its float32 features allow."""

import pytest
import torch
from calibrations import run_fast
from small_lambda import ALLOWED, CASES, SMALL, Case
from tiny_models import clip_suite

TABLE = [
    pytest.param(case, id=name, marks=[pytest.mark.slow] * case.slow)
    for name, case in CASES.items()
]


@pytest.mark.parametrize("case", TABLE)
def test_errors_stay_within_four_times_those_of_float32_features(case: Case):
    errors = case.errors(seed=1)
    assert errors.package <= ALLOWED * errors.at_best, errors
    assert errors.package < 1e-4


def test_sums_too_coarse_for_lambda_are_warned_of(caplog: pytest.LogCaptureFixture):
    suite = clip_suite(seed=1).to(torch.float32)
    run_fast(suite, sums_precision="float32")  # lambda 0.05
    assert "too coarse" not in caplog.text
    run_fast(suite, SMALL, sums_precision="float32")
    assert caplog.text.count("too coarse") == 1
    assert "method.sums_precision=float32 is too coarse for method.ridge_" in caplog.text
