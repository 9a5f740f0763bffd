"""Errors at a small lambda: of the package, and of what float32 features allow at best."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from calibrations import distance, run_fast, run_slow
from oracle import Knobs
from tiny_models import Suite, clip_suite, decoder_suite, gpt2_suite, residual_suite, t5_suite
from tiny_open_clip import converted
from torch import nn

SMALL = Knobs(alpha=0.6, lam=1e-5, rho=2.0, eps=1e-8)
ALLOWED = 4.0
"""The package's error may be so many times that of float32 features with a float64 rest."""


class Errors(NamedTuple):
    """Largest relative error of a parameter against the oracle in float64."""

    package: float
    at_best: float


@dataclass(frozen=True)
class Case:
    """A family's tiny suite of a seed, and the runs of the package and of the oracle on it."""

    make: Callable[[int], Suite]
    shown: Callable[[nn.Module], nn.Module] = lambda model: model
    """The oracle's model as the package sees it, where that is another class."""

    def errors(self, seed: int, knobs: Knobs = SMALL, **settings: Any) -> Errors:
        """Errors with float32 models."""
        suite = self.make(seed).to(torch.float32)
        right = run_slow(suite, knobs).model
        at_best = run_slow(suite, knobs, features=torch.float32).model
        models = {"merged": self.shown(suite.merged), "base": self.shown(suite.base)}
        experts = {task: self.shown(expert) for task, expert in suite.experts.items()}
        shown = replace(suite, experts=experts, **models)
        found = run_fast(shown, knobs, **settings).model
        wanted = self.shown(right)
        return Errors(distance(found, wanted), distance(self.shown(at_best), wanted))


def open_clip_inputs(seed: int) -> Suite:
    """A CLIP suite whose batches are plain tensors, as open_clip's models take them."""
    suite = clip_suite(seed=seed)
    suite.inputs = {t: [b["pixel_values"] for b in batches] for t, batches in suite.inputs.items()}
    return suite


def as_tower(model: nn.Module) -> nn.Module:
    """An open_clip tower with a CLIP model's weights and dtype."""
    return converted(model).to(next(model.parameters()).dtype)


CASES = {
    "clip": Case(lambda seed: clip_suite(seed=seed)),
    "clip, 1 image a task": Case(lambda seed: clip_suite(seed=seed, sizes=(1,), width=24)),
    "open_clip": Case(open_clip_inputs, shown=as_tower),
    "t5": Case(lambda seed: t5_suite(seed=seed)),
    "umt5": Case(lambda seed: t5_suite(seed=seed, kind="umt5")),
    "llama": Case(lambda seed: decoder_suite("llama", seed=seed)),
    "qwen3": Case(lambda seed: decoder_suite("qwen3", seed=seed)),
    "gemma2": Case(lambda seed: decoder_suite("gemma2", seed=seed)),
    "phi3": Case(lambda seed: decoder_suite("phi3", seed=seed)),
    "gpt2 (replay)": Case(lambda seed: gpt2_suite(seed=seed)),
    "residual network (replay)": Case(lambda seed: residual_suite(seed=seed)),
}
