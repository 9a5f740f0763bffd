"""Below lambda 0.01 the package is as exact as its float32 features allow."""

import pytest
from small_lambda import ALLOWED, CASES, QUICK, errors_of

TABLE = [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES]


@pytest.mark.parametrize("name", TABLE)
def test_errors_stay_within_four_times_those_of_float32_features(name: str):
    errors = errors_of(CASES[name], seed=1)
    assert errors.package <= ALLOWED * errors.at_best, errors
    assert errors.package < 1e-4
