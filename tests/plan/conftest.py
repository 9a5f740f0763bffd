"""A machine whose rates are known, so that nothing is measured here."""

import pytest

from fusion_bench_featcal.plan.rates import Points, Rates


@pytest.fixture
def rates() -> Rates:
    """1 GFLOP/s and 1 GB/s whatever the size."""
    one: Points = ((10.0, 1e9), (1000.0, 1e9))
    kinds = ("linear", "low", "gram", "cross", "attention", "wide", "factor", "factor_wide")
    kinds += ("solve", "solve_wide", "moved", "costly")
    return Rates("cpu", 1, "torch", **dict.fromkeys(kinds, one))
