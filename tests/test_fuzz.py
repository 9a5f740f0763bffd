"""Random settings, and runs killed at random moments, give the right model or are refused."""

import time
from pathlib import Path

import pytest
import torch
from calibrations import cast, run_fast
from fuzzing import outcome, random_case
from killing import digest_of, try_kill
from tiny_models import clip_suite

SEEDS = [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_settings(seed: int):
    outcome(random_case(seed))


def test_killed_runs_resume_to_the_same_model(tmp_path: Path):
    suite = clip_suite().to(torch.float32)
    suite.inputs, start = cast(suite.inputs, torch.float32), time.perf_counter()
    expected = digest_of(run_fast(suite).model)
    seconds, blocks = time.perf_counter() - start, len(suite.blocks)
    for seed in range(5):  # one of each moment
        report, digest = try_kill(
            lambda folder, resume: run_fast(suite, checkpoint_dir=str(folder), resume=resume),
            tmp_path / str(seed), 2 * blocks + 3, blocks, seconds, seed,
        )  # fmt: skip
        assert digest == expected, report
