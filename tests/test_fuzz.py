"""Random settings give the same finite model twice, or an error that names a setting."""

import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from calibrations import cast
from tiny_models import Suite, clip_suite, gpt2_suite, residual_suite, t5_suite
from torch import nn

from fusion_bench_featcal import CalibrationError, FeatCalSettings, calibrate

SAMPLES = 7  # of each task
# Maker, dtype, families, and patterns of modules.
WORKLOADS: dict[str, tuple[Callable[[], Suite], torch.dtype, tuple[str, ...], tuple[str, ...]]] = {
    "clip": (lambda: clip_suite(tasks=2), torch.float32, ("auto", "clip"),
             ("fc1", "self_attn.*", "!mlp.*", "!*norm*", "*.1.*")),
    "clip16": (lambda: clip_suite(tasks=2, seed=5), torch.bfloat16, ("auto",),
               ("fc2", "!self_attn.*")),
    "residual": (lambda: residual_suite(sizes=(4, 3)), torch.float32, ("auto", "stack"),
                 ("up", "!down", "layers.1.*")),
    "gpt2": (gpt2_suite, torch.float32, ("auto", "stack"), ("c_fc", "attn.*", "!ln_*")),
    "t5": (lambda: t5_suite(depths=(1, 1)), torch.float32, ("auto", "t5"),
           ("wi_0", "!SelfAttention.*", "EncDecAttention.k")),
}  # fmt: skip


def random_settings(draw: random.Random, name: str) -> dict[str, Any]:
    """Settings that are accepted one by one, although not together for every model."""
    _, _, families, patterns = WORKLOADS[name]
    choices: dict[str, list[Any]] = {
        "ridge_lambda": [0.0, 1e-9, 1e-5, 1e-3, 0.05, 1.0, 30, 1e8],
        "mix_alpha": [0.0, 0.3, 1.0, 1, draw.random()],
        "anchor_rho": [0, 1.0, 2.0, -3.0],
        "samples_per_task": [SAMPLES, SAMPLES, 5, 1, SAMPLES + 1],
        "calibrate_bias": [True, False],
        "calibrate_norm": [True, False],
        "modules": [None, None, draw.sample(patterns, 2), ["nothing_like_it"]],
        "decoder_rows": ["all", "targets"],
        "family": [*families, *families, "t5" if name == "clip" else "clip"],
        "expert_read_budget": [None, "100%", f"{draw.randrange(1, 100)}%", "1GB", 1],
        "activations": ["auto", "device", "host"],
        "seed": [draw.randrange(100)],
    }
    names = {*draw.sample(sorted(choices), draw.randrange(4, len(choices))), "samples_per_task"}
    return {key: draw.choice(choices[key]) for key in sorted(names)}


@cache
def suite_of(name: str) -> Suite:
    make, dtype, *_ = WORKLOADS[name]
    suite = make().to(dtype)
    suite.inputs = cast(suite.inputs, dtype)
    return suite


def attempt(suite: Suite, settings: dict[str, Any]) -> nn.Module | str:
    """Return the calibrated model, or the error, which must name a setting."""
    models = suite.merged, suite.base, suite.experts
    try:
        chosen = FeatCalSettings(**settings)
        return calibrate(*models, suite.inputs, chosen, progress=False).model
    except (CalibrationError, ValueError) as error:
        assert re.search(r"(method|modelpool)\.[a-z_*]+", str(error)), error
        return str(error)


SEEDS = [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_settings(seed: int):
    draw = random.Random(seed)
    name = draw.choice(list(WORKLOADS))
    settings, suite = random_settings(draw, name), suite_of(name)
    first, second = (attempt(suite, settings) for _ in range(2))
    if isinstance(first, str):
        assert first == second
        return
    assert isinstance(second, nn.Module)
    again, before = second.state_dict(), suite.merged.state_dict()
    for key, value in first.state_dict().items():
        assert (value.shape, value.dtype) == (before[key].shape, before[key].dtype), key
        assert torch.isfinite(value).all() and torch.equal(value, again[key]), key
