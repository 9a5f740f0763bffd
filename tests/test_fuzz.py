"""Random settings, and runs killed at random moments, give the right model or are refused."""

import time
from pathlib import Path

import pytest
import torch
from calibrations import cast, run_fast
from fuzzing import outcome, random_case
from killing import MOMENTS, digest_of, try_kill
from tiny_models import clip_suite

SEEDS = [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_settings(seed: int):
    outcome(random_case(seed))


def test_killed_runs_resume_to_the_same_model(tmp_path: Path):
    suite = clip_suite(tasks=2).to(torch.float32)
    suite.inputs, start = cast(suite.inputs, torch.float32), time.perf_counter()
    expected = digest_of(run_fast(suite).model)
    seconds, writes = time.perf_counter() - start, 2 * len(suite.blocks) + 3

    def calibrate(folder: Path, resume: bool):
        return run_fast(suite, checkpoint_dir=str(folder), resume=resume)

    for seed in range(len(MOMENTS)):
        report, digest = try_kill(calibrate, tmp_path / str(seed), writes, seconds, seed)
        assert digest == expected, report
