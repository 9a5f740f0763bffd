"""Errors at a small lambda, of the package and of a float64 solution of float32 features."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import tiny_models as tiny
import torch
from calibrations import distance, run_fast, run_slow
from oracle import Knobs
from tiny_models import Suite

SMALL = Knobs(alpha=0.6, lam=1e-5, rho=2.0)
ALLOWED = 4.0
"""The package's error may be so many times that of float32 features with a float64 rest."""


class Errors(NamedTuple):
    """Largest relative error of a parameter against the oracle in float64."""

    package: float
    at_best: float


def errors_of(
    make: Callable[..., Suite], seed: int, knobs: Knobs = SMALL, **settings: Any
) -> Errors:
    """Errors with float32 models of a suite."""
    suite = make(seed=seed).to(torch.float32)
    expected = run_slow(suite, knobs).model
    at_best = run_slow(suite, knobs, features=torch.float32).model
    model = run_fast(suite, knobs, **settings).model
    return Errors(distance(model, expected), distance(at_best, expected))


# Makers of tiny suites, of which those in `QUICK` are tested each time.
CASES: dict[str, Callable[..., Suite]] = {
    "clip": tiny.clip_suite,
    "clip, 1 image a task": partial(tiny.clip_suite, sizes=(1,), width=24),
    "t5": tiny.t5_suite,
    "umt5": partial(tiny.t5_suite, kind="umt5"),
    **{m: partial(tiny.decoder_suite, m) for m in ("llama", "qwen3", "gemma2", "phi3")},
    "gpt2": tiny.gpt2_suite,
    "residual network": tiny.residual_suite,
}
QUICK = ("clip, 1 image a task", "gpt2")
