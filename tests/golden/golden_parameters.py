"""Calibrated parameters in a few numbers each, and the calibrations that are kept so."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from golden_models import MAKERS, Suite, clip_suite, noise, stable_name
from torch import Tensor, nn

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate

Sketch = dict[str, list[float]]
"""Changed parameter -> norm of the change, and its products with four random directions."""

PROJECTIONS = 4
DIGITS = 6


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by names that all releases of transformers share."""
    return {stable_name(name): p.detach() for name, p in model.named_parameters()}


def sketch(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Sketch:
    """Describe the change of every parameter that changed; new parameters count from zero."""
    found = {}
    for name, value in sorted(after.items()):
        change = value.double() - (before[name].double() if name in before else 0)
        if bool(change.any()):
            products = (_directions(name, change.shape) * change).flatten(1).sum(1)
            found[name] = [rounded(number) for number in [change.norm().item(), *products.tolist()]]
    return found


@cache
def _directions(name: str, shape: torch.Size) -> Tensor:
    return noise(name, (PROJECTIONS, *shape))


def rounded(number: float) -> float:
    """The number in as many digits as are kept."""
    return float(f"{number:.{DIGITS}g}")


def differences(found: Mapping[str, Any], kept: Mapping[str, Any], bound: float) -> list[str]:
    """Parameters that are further apart than `bound` times the norm of the kept change."""
    gaps = {name: gap(found[name], kept[name]) for name in kept if name in found}
    wrong = [f"{name}: {size:.1e} of its norm" for name, size in gaps.items() if size > bound]
    return wrong + [f"{name}: in one only" for name in sorted(found.keys() ^ kept.keys())]


def gap(found: list[float], kept: list[float]) -> float:
    """Largest difference of two lists, relative to the first of the kept numbers."""
    return max(abs(a - b) for a, b in zip(found, kept, strict=True)) / kept[0]


class Case(NamedTuple):
    """A calibration of a family's suite, in float64 and (`float32`) in float32 too."""

    family: str
    settings: dict[str, Any]
    float32: bool = False


# Float64 models differ between machines, libraries and releases by T5's norms alone, which are
# float32 whatever the model's dtype: up to 1.5e-6. Float32 models were up to 6e-5 apart from
# float64's; 1 % of lambda moves defaults by 7e-3 or more, the small lambda by 2e-4 or more.
EXACT = 2e-5
FLOAT32 = 3e-4
SMALL = {"ridge_lambda": 1e-4, "anchor_rho": 1.0}

CASES: dict[str, Case] = {f"{kind}: defaults": Case(kind, {}, float32=True) for kind in MAKERS}
CASES |= {f"{kind}: small lambda": Case(kind, SMALL, float32=True) for kind in MAKERS}
CASES |= {
    "clip: no base": Case("clip", {"anchor_rho": 1.0}),
    "clip: mix_alpha 0": Case("clip", {"mix_alpha": 0.0, "log_drift": False}),
    "clip: mix_alpha 1": Case("clip", {"mix_alpha": 1.0}),
    "clip: anchor_rho -0.5": Case("clip", {"anchor_rho": -0.5}),
    "clip: eps": Case("clip", {"eps": 0.01}),
    "clip: five samples": Case("clip", {"samples_per_task": 5}),
    "clip: batches of two": Case("clip", {"batch_size": 2}),
    "clip: no bias": Case("clip", {"calibrate_bias": False}),
    "clip: no norm": Case("clip", {"calibrate_norm": False}),
    "clip: modules": Case("clip", {"modules": ["fc1", "self_attn.*", "!k_proj"]}),
    "clip: demo weights": Case("clip", {"token_weights": "demo_last_block"}, float32=True),
    "clip: from files": Case("clip", {"stream_experts": True}, float32=True),
    "clip: read budget": Case("clip", {"expert_read_budget": "50%"}, float32=True),
    "clip: another activation": Case("clip", {"ignore_config": ["hidden_act"]}),
    "t5: targets": Case("t5", {"decoder_rows": "targets"}),
    "t5: no norm": Case("t5", {"calibrate_norm": False, "ridge_lambda": 0.5}),
    "llama: targets": Case("llama", {"decoder_rows": "targets"}, float32=True),
    "llama: modules": Case("llama", {"modules": ["mlp.*"], "mix_alpha": 0.6}),
    "residual: no bias": Case("residual", {"calibrate_bias": False, "mix_alpha": 0.6}),
}


@cache
def _suite(family: str, dtype: torch.dtype) -> Suite:
    return MAKERS[family]().to(dtype)


def calibrated(name: str, dtype: torch.dtype, folder: Path, **changes: Any) -> dict[str, Any]:
    """Run one case.

    Args:
        name: The case.
        dtype: Of its models.
        folder: Where experts may be written.
        **changes: Further settings.

    Returns:
        The sketch of all changes, under `parameters`, and the summed drift of all blocks before
        and after their update, under `drift`.
    """
    case = CASES[name]
    suite = _suite(case.family, dtype)
    experts: dict[str, Any] = dict(suite.experts)
    if "from files" in name:
        for task, expert in suite.experts.items():
            expert.save_pretrained(folder / task)  # type: ignore[operator]
            experts[task] = SafetensorsExpert(folder / task)
    if "another activation" in name:
        experts = dict(clip_suite("gelu").to(dtype).experts)
    usual = {"family": suite.family, "samples_per_task": suite.samples}
    settings = FeatCalSettings(**(usual | case.settings | changes))
    base = None if "no base" in name else suite.base
    result = calibrate(suite.merged, base, experts, suite.batches, settings, progress=False)
    tasks = [record for record in result.log.records if record["kind"] == "task"]
    drift = [sum(r.get(key) or 0 for r in tasks) for key in ("drift_before", "drift_after")]
    return {
        "parameters": sketch(values_of(suite.merged), values_of(result.model)),
        "drift": [rounded(number) for number in drift],
    }
