"""Random settings, and random damage to checkpoints: each gives the right model or is refused."""

import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from calibrations import cast
from test_settings import SETTINGS
from tiny_models import Suite, clip_suite, gpt2_suite, residual_suite, t5_suite
from torch import nn

from fusion_bench_featcal import CalibrationError, FeatCalSettings, calibrate
from fusion_bench_featcal.fusionbench.options import read_settings

NAMES_A_SETTING = re.compile(r"(method|modelpool)\.[a-z_*]+")
SAMPLES = 7  # of each task in every suite below


# Maker, dtype, families that may cut the model, and patterns of its modules.
WORKLOADS: dict[str, tuple[Any, torch.dtype, tuple[Any, ...], tuple[str, ...]]] = {
    "clip": (lambda: clip_suite(tasks=2), torch.float32,
             ("auto", "clip"),
             ("fc1", "self_attn.*", "!mlp.*", "!*norm*", "*.1.*")),
    "clip16": (lambda: clip_suite(tasks=2, seed=5), torch.bfloat16, ("auto",),
               ("fc2", "!self_attn.*")),
    "residual": (lambda: residual_suite(sizes=(4, 3)), torch.float32, ("auto", "stack"),
                 ("up", "!down", "layers.1.*")),
    "gpt2": (gpt2_suite, torch.float32, ("auto", "stack"), ("c_fc", "attn.*", "!ln_*")),
    "t5": (lambda: t5_suite(depths=(1, 1)), torch.float32, ("auto", "t5"),
           ("wi_0", "!SelfAttention.*", "EncDecAttention.k")),
}  # fmt: skip
WRONG: list[tuple[str, Any]] = [
    *((name, value) for name, (_, _, refused) in SETTINGS.items() for value in refused),
    ("family", "clop"), ("ridge_lamda", 0.1), ("alpha", 0.3),
    ("resume", True),  # without a folder
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Random settings for one workload. `valid`: every value is of its type and in its range."""

    workload: str
    settings: dict[str, Any]
    valid: bool


def random_case(seed: int) -> Case:
    """Settings of which about three in four are valid."""
    generator = random.Random(seed)
    draw, name = generator.choice, generator.choice(list(WORKLOADS))
    _, _, families, patterns = WORKLOADS[name]
    settings: dict[str, Any] = {
        "ridge_lambda": draw([0.0, 1e-9, 1e-5, 1e-3, 0.05, 1.0, 30, 1e8, generator.random()]),
        "mix_alpha": draw([0.0, 0.3, 1.0, 1, generator.random()]),
        "anchor_rho": draw([0, 1.0, 2.0, -3.0, 2 * generator.random()]),
        "samples_per_task": draw([SAMPLES, SAMPLES, 5, 1, SAMPLES + 1]),
        "calibrate_bias": draw([True, False]),
        "calibrate_norm": draw([True, False]),
        "modules": draw([None, None, generator.sample(patterns, 2), ["nothing_like_it"]]),
        "decoder_rows": draw(["all", "targets"]),
        "family": draw([*families, *families, "t5" if name == "clip" else "clip"]),
        "expert_read_budget": draw([None, "100%", f"{generator.randrange(1, 100)}%", "1GB", 1]),
        "activations": draw(["auto", "device", "host"]),
        "seed": generator.randrange(100),
    }
    keys = generator.sample(sorted(settings), generator.randrange(4, len(settings)))
    settings = {key: settings[key] for key in dict.fromkeys([*keys, "samples_per_task", "family"])}
    valid = generator.random() < 0.75
    if not valid:
        wrong, value = draw(WRONG)
        settings[wrong] = value
    return Case(name, settings, valid)


@cache
def suite_of(workload: str) -> Suite:
    make, dtype, *_ = WORKLOADS[workload]
    suite = make().to(dtype)
    suite.inputs = cast(suite.inputs, dtype)
    return suite


def attempt(workload: str, settings: dict[str, Any]) -> nn.Module | str:
    """Return the calibrated model, or the message that refuses it, which must name a setting."""
    suite = suite_of(workload)
    models = suite.merged, suite.base, suite.experts
    try:
        (chosen,) = read_settings(settings, [FeatCalSettings])
        return calibrate(*models, suite.inputs, chosen, progress=False).model
    except (CalibrationError, ValueError) as error:
        assert NAMES_A_SETTING.search(str(error)), f"message without a setting: {error}"
        return str(error)


def outcome(case: Case) -> str:
    """Run a case twice: `refused: ...` or `calibrated`. Fails if these or the models differ."""
    first, second = (attempt(case.workload, case.settings) for _ in range(2))
    if isinstance(first, str):
        assert first == second, f"{case}: refused as {first}, then {second}"
        return f"refused: {first}"
    assert case.valid, f"{case}: settings that are not valid were used"
    assert isinstance(second, nn.Module), f"{case}: refused only once: {second}"
    merged = suite_of(case.workload).merged
    assert type(first) is type(merged), case
    again, before = second.state_dict(), merged.state_dict()
    for name, value in first.state_dict().items():
        assert (value.shape, value.dtype) == (before[name].shape, before[name].dtype), name
        assert bool(torch.isfinite(value).all()), f"{case}: {name} is not finite"
        assert torch.equal(value, again[name]), f"{case}: {name} differs in the second run"
    return "calibrated"


def damage(folder: Path, other: Path, seed: int) -> str:
    """Damage one file of a folder of checkpoints. `other` is the folder of another run."""
    generator = random.Random(seed)
    path = generator.choice(sorted(folder.glob("*.safetensors")))
    data, at = bytearray(path.read_bytes()), generator.randrange(path.stat().st_size)
    same_kind = sorted(set(folder.glob(f"*{path.suffix}")) - {path})
    damages = {
        "removed": None,
        "cut": data[:at],
        "of another run": (other / path.name).read_bytes(),
        "another block's": generator.choice(same_kind).read_bytes(),
        "added bytes": data + b"\0" * 8,
    }
    kind, content = generator.choice(list(damages.items()))
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    return f"{path.name} {kind}"
