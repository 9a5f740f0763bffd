"""Description of all that a calibration depends on, to be kept, compared and explained."""

import json
import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.core.float32_products import products_in_force
from fusion_bench_featcal.digests import (
    describe_model,
    describe_software,
    digest_tensor,
    without_addresses,
)
from fusion_bench_featcal.experts.reading import BASE
from fusion_bench_featcal.settings import SETTINGS_OF_THE_RUN, FeatCalSettings

_PACKAGES = ("torch", "transformers", "safetensors", "fusion-bench-featcal")
# Parts of this package that make a block's parameters from weights and samples.
_CODE = ("core", "engine", "families", "checkpoints", "calibration.py", "experts")
# Settings without a part in the result: samples and weights are compared themselves.
# What `linear_kernel` came to is told under `precision`.
_WITHOUT_EFFECT = {*SETTINGS_OF_THE_RUN, "family", "linear_kernel"}


def describe_settings(settings: FeatCalSettings) -> dict[str, Any]:
    """The settings that a result depends on."""
    values = settings.of_one_trial().as_dict()
    return {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT}


def describe_run(
    merged: nn.Module, problem: Any, kernel: str, upstream: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Everything that a calibration depends on but its samples and the weights it reads by block.

    Args:
        merged: The merged model, as it is shown to the calibration.
        problem: The `engine.problem.Problem`.
        kernel: What multiplies matrices on the CPU.
        upstream: Description of a fused upstream merger.

    Returns:
        A JSON-able mapping. `machine` tells what may change the rounding and no more.
    """
    tensors = dict(merged.named_buffers()) | merged.state_dict()
    family, device = problem.family, problem.device
    with problem.autocast():
        on = torch.is_autocast_enabled(device.type)
        autocast = str(torch.get_autocast_dtype(device.type)) if on else None
    return {
        "settings": describe_settings(problem.settings),
        # in order: sums are rounded in it
        "models": [*([] if problem.base is None else [BASE]), *problem.tasks],
        "family": {"name": family.name, "options": without_addresses(repr(family))},
        "blocks": [list(stage) for stage in problem.stages],
        "merged": describe_model(merged),
        "weights": {name: digest_tensor(t) for name, t in tensors.items()},
        "precision": {
            "device": device.type,
            "autocast": autocast,
            "products": products_in_force(),
            "linear_kernel": kernel,
        },
        "software": describe_software(_PACKAGES, _CODE),
        "machine": _describe_machine(device),
        "upstream": None if upstream is None else dict(upstream),
    }


def _describe_machine(device: torch.device) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    return {
        "accelerator": torch.cuda.get_device_name(device) if on_cuda else None,
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


_LABELS = {
    "format": "format of the files",
    "processes": "number of processes (fabric.devices x fabric.num_nodes)",
    "settings": "method.",
    "models": "base and experts (modelpool.models)",
    "family": "method.family: ",
    "merged": "merged model's ",
    "upstream": "fused upstream merger (method.base_method, method.fuse_merge) ",
    "precision": "precision: ",
    "software": "version of ",
    "machine": "",
}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences of a description, or of some of its entries, to an earlier one: a phrase each."""
    differing: list[str] = []
    for part, value in now.items():
        before = then.get(part)
        if _text(before) == _text(value):
            continue
        label = _LABELS.get(part, part)
        if part == "weights":
            names = differing_names(before if isinstance(before, Mapping) else {}, value)
            differing.append(f"weights of the merged model ({names})")
        elif part == "samples":
            samples = before if isinstance(before, Mapping) else {}
            tasks = [task for task in value if samples.get(task) != value[task]]
            differing.append(f"calibration samples of the tasks {tasks} (modelpool.*_datasets)")
        elif isinstance(value, Mapping) and isinstance(before, Mapping):
            for key in sorted({*before, *value}):
                if _text(before.get(key)) != _text(value.get(key)):
                    name = _text(key)[1:-1][:100]  # whatever a damaged file holds, in plain ASCII
                    differing.append(f"{label}{name}{_then_now(before.get(key), value.get(key))}")
        else:
            differing.append(f"{label}{_then_now(before, value)}")
    return differing


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _then_now(then: Any, now: Any) -> str:
    texts = [_text(then), _text(now)]
    if max(map(len, texts)) > 200:  # a whole config or list of blocks tells nobody anything
        return ""
    return f" ({texts[0]} then, {texts[1]} now)"


def differing_names(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Phrase on the tensors whose digests differ; empty if none do."""
    names = [name for name in {**now, **then} if then.get(name) != now.get(name)]
    return f"{len(names)} of {len(now)} tensors, the first is {names[0]}" if names else ""
