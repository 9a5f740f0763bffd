"""Random settings are refused with a message that names one, or give the same model twice."""

import pytest
from fuzzing import outcome, random_case

SEEDS = [*range(30), *(pytest.param(n, marks=pytest.mark.slow) for n in range(30, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_settings(seed: int):
    outcome(random_case(seed))


def test_half_of_the_random_settings_are_valid_and_many_calibrate():
    cases = [random_case(seed) for seed in range(400)]
    assert sum(case.valid for case in cases) >= 200
    assert {case.workload for case in cases} >= {"clip", "t5", "gpt2", "residual"}
