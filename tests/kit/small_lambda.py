"""Errors at a small lambda, of the package and of a float64 solution of float32 features."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import tiny_models as tiny
import torch
from calibrations import distance, run_fast, run_slow
from oracle import Knobs

SMALL = Knobs(alpha=0.6, lam=1e-5, rho=2.0, eps=1e-8)
ALLOWED = 4.0
"""The package's error may be so many times that of float32 features with a float64 rest."""


class Errors(NamedTuple):
    """Largest relative error of a parameter against the oracle in float64."""

    package: float
    at_best: float


@dataclass(frozen=True)
class Case:
    """Makes a family's tiny suite of a seed."""

    make: Callable[..., tiny.Suite]
    slow: bool = True

    def errors(self, seed: int, knobs: Knobs = SMALL, **settings: Any) -> Errors:
        """Errors with float32 models."""
        suite = self.make(seed=seed).to(torch.float32)
        expected = run_slow(suite, knobs).model
        at_best = run_slow(suite, knobs, features=torch.float32).model
        model = run_fast(suite, knobs, **settings).model
        return Errors(distance(model, expected), distance(at_best, expected))


CASES = {
    "clip": Case(tiny.clip_suite),
    "clip, 1 image a task": Case(partial(tiny.clip_suite, sizes=(1,), width=24), slow=False),
    "t5": Case(tiny.t5_suite),
    "umt5": Case(partial(tiny.t5_suite, kind="umt5")),
    **{m: Case(partial(tiny.decoder_suite, m)) for m in ("llama", "qwen3", "gemma2", "phi3")},
    "gpt2 (replay)": Case(tiny.gpt2_suite, slow=False),
    "residual network (replay)": Case(tiny.residual_suite),
}
