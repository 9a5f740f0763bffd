"""Processes that are killed at any moment lose nothing."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from kills import Workload, tiny
from tiny_models import clip_suite, t5_suite


@pytest.mark.parametrize(("make", "seeds"), [(clip_suite, range(5)), (t5_suite, range(5, 8))])
def test_killed_runs_resume_to_the_same_model(make, seeds):
    workload = Workload("tiny", tiny(make))
    for seed in seeds:
        told, same = workload.killed(seed)
        assert same, told
