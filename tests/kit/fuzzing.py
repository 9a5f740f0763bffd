"""Random settings, and random damage to checkpoints: never a wrong model comes of them."""

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from calibrations import cast
from test_settings import OUT_OF_RANGE
from tiny_models import REPLAY, Suite, clip_suite, gpt2_suite, residual_suite, t5_suite
from torch import nn

from fusion_bench_featcal import CalibrationError, calibrate
from fusion_bench_featcal.fusionbench.options import checked_settings

NAMES_A_SETTING = re.compile(r"(method|modelpool)\.[a-z_*]+")
SAMPLES = 7  # of each task in every suite below


@dataclass(frozen=True)
class Workload:
    """A tiny model and the families that it may be cut by."""

    make: Callable[[], Suite]
    dtype: torch.dtype
    families: tuple[Any, ...]
    patterns: tuple[str, ...]


WORKLOADS = {
    "clip": Workload(
        lambda: clip_suite(tasks=2),
        torch.float32,
        ("auto", "clip", {"name": "replay", "blocks": ["*.encoder.layers.*"]}),
        ("fc1", "self_attn.*", "!mlp.*", "!*norm*", "*.1.*"),
    ),
    "clip64": Workload(
        lambda: clip_suite(tasks=2, seed=4), torch.float64, ("auto",), ("!fc2", "q_proj", "mlp.*")
    ),
    "clip16": Workload(
        lambda: clip_suite(tasks=2, seed=5), torch.bfloat16, ("auto",), ("fc2", "!self_attn.*")
    ),
    "residual": Workload(
        lambda: residual_suite(sizes=(4, 3)),
        torch.float32,
        ({"name": "replay", "blocks": ["layers.*"]},),
        ("up", "!down", "layers.1.*"),
    ),
    "gpt2": Workload(
        gpt2_suite,
        torch.float32,
        ({"name": "replay", "blocks": ["h.*"]},),
        ("c_fc", "attn.*", "!ln_*"),
    ),
    "t5": Workload(
        lambda: t5_suite(depths=(1, 1)),
        torch.float32,
        ("auto", "t5", REPLAY),
        ("wi_0", "!SelfAttention.*", "EncDecAttention.k"),
    ),
}

WRONG: list[tuple[str, Any]] = [
    *((name, value) for name, value, _ in OUT_OF_RANGE),
    ("family", "clop"),
    ("family", {"name": "replay"}),
    ("resume", True),  # without a folder
    ("ridge_lamda", 0.1),
    ("alpha", 0.3),
]


@dataclass(frozen=True)
class Case:
    """Random settings for one workload; `valid`: every value is of its type and in its range."""

    workload: str
    settings: dict[str, Any]
    valid: bool


def random_case(seed: int) -> Case:
    """Settings of which about three in four are valid."""
    generator = random.Random(seed)
    name = generator.choice(list(WORKLOADS))
    workload, draw = WORKLOADS[name], generator.choice
    settings: dict[str, Any] = {
        "ridge_lambda": draw([0.0, 1e-9, 1e-5, 1e-3, 0.05, 1.0, 30, 1e8, generator.random()]),
        "mix_alpha": draw([0.0, 0.3, 1.0, 1, generator.random()]),
        "anchor_rho": draw([0, 1.0, 2.0, -3.0, 2 * generator.random()]),
        "eps": draw([0.0, 1e-12, 1e-8, 1e-3]),
        "samples_per_task": draw([SAMPLES, SAMPLES, 5, 1, SAMPLES + 1]),
        "calibrate_bias": draw([True, False]),
        "calibrate_norm": draw([True, False]),
        "modules": draw([None, None, generator.sample(workload.patterns, 2), ["nothing_like_it"]]),
        "token_weights": draw(["uniform", "uniform", "demo_last_block"]),
        "decoder_rows": draw(["all", "targets"]),
        "family": draw(
            [*workload.families, *workload.families, "t5" if name == "clip" else "clip"]
        ),
        "log_drift": draw([True, False]),
        "linear_kernel": draw(["auto", "torch", "onednn"]),
        "sums_precision": draw(["auto", "float32", "float64", "tf32", "bfloat16"]),
        "expert_read_budget": draw([None, "100%", f"{generator.randrange(1, 100)}%", "1GB", 1]),
        "activations": draw(["auto", "device", "host", "disk"]),
        "seed": generator.randrange(100),
    }
    if not isinstance(workload.families[0], str):
        settings["family"] = workload.families[0]
    kept = generator.sample(sorted(settings), generator.randrange(4, len(settings)))
    kept += [key for key in ("samples_per_task", "family") if key not in kept]
    settings = {key: settings[key] for key in kept}
    valid = generator.random() < 0.75
    if not valid:
        wrong, value = draw(WRONG)
        settings[wrong] = value
    return Case(name, settings, valid)


@cache
def suite_of(workload: str) -> Suite:
    return WORKLOADS[workload].make().to(WORKLOADS[workload].dtype)


def attempt(workload: str, settings: dict[str, Any]) -> nn.Module | str:
    """The calibrated model, or the message it is refused with.

    Raises:
        AssertionError: If the message names no setting.
    """
    suite = suite_of(workload)
    try:
        checked = checked_settings(settings)
        inputs = cast(suite.inputs, WORKLOADS[workload].dtype)
        return calibrate(
            suite.merged, suite.base, suite.experts, inputs, checked, progress=False
        ).model
    except (CalibrationError, ValueError) as error:
        assert NAMES_A_SETTING.search(str(error)), f"message without a setting: {error}"
        return str(error)


def outcome(case: Case) -> str:
    """Run a case twice: `refused: ...` or `calibrated`.

    Raises:
        AssertionError: If settings that are not valid are used, or a model is wrong.
    """
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
    """Do something bad to one checkpoint file; what was done.

    Args:
        folder: The checkpoints.
        other: Those of another run, with files of the same names.
        seed: Chooses.
    """
    generator = random.Random(seed)
    path = generator.choice(sorted(folder.iterdir()))
    data = path.read_bytes()
    what = generator.choice(_DAMAGES)
    if what == "removed":
        path.unlink()
    elif what == "emptied":
        path.write_bytes(b"")
    elif what == "cut":
        path.write_bytes(data[: generator.randrange(len(data))])
    elif what == "flipped a bit":
        place = generator.randrange(len(data))
        flipped = data[place] ^ (1 << generator.randrange(8))
        path.write_bytes(data[:place] + bytes([flipped]) + data[place + 1 :])
    elif what == "of another run":
        shutil.copyfile(other / path.name, path)
    elif what == "another block's":
        same_kind = sorted(set(folder.glob(f"*{path.suffix}")) - {path})
        shutil.copyfile(generator.choice(same_kind), path)
    elif what == "added bytes":
        path.write_bytes(data + b"\0" * generator.randrange(1, 9))
    else:
        _edit(path, data, generator)
    return f"{path.name} {what}"


_DAMAGES = (
    "removed", "emptied", "cut", "cut", "flipped a bit", "flipped a bit", "flipped a bit",
    "of another run", "another block's", "added bytes", "edited", "edited",
)  # fmt: skip


def _edit(path: Path, data: bytes, generator: random.Random) -> None:
    """Change a value as a person might: in a manifest, or NaN in a tensor."""
    if path.suffix != ".json":
        place = len(data) - 8 * generator.randrange(1, 9)
        path.write_bytes(data[:place] + b"\xff" * 8 + data[place + 8 :])
        return
    content = json.loads(data)
    entry: Any = content
    holder: Any = None
    key: Any = None
    while isinstance(entry, dict | list) and entry:
        holder, key = entry, generator.choice(list(entry) if isinstance(entry, dict) else [0])
        entry = holder[key]
    if key is None:
        return
    if isinstance(entry, bool | int | float):
        holder[key] = entry + 1
    elif generator.random() < 0.5 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = "other"
    path.write_text(json.dumps(content, indent=1))
