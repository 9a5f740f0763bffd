"""Fingerprint of all inputs of a calibration, stored with finished blocks and compared."""

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.core.float32_products import products_in_force
from fusion_bench_featcal.digests import (
    InputsDigest,
    describe_model,
    describe_software,
    digest_tensor,
    without_addresses,
)
from fusion_bench_featcal.experts.reads import BASE
from fusion_bench_featcal.experts.source import ExpertSource, rows_of
from fusion_bench_featcal.experts.working_model import WorkingModel
from fusion_bench_featcal.json_files import digest_json
from fusion_bench_featcal.processes import Processes
from fusion_bench_featcal.settings import SETTINGS_OF_THE_RUN, FeatCalSettings
from fusion_bench_featcal.streams.batch import Batch

_PACKAGES = ("torch", "transformers", "safetensors", "fusion-bench-featcal")
# Parts of this package that compute a block's parameters from weights and samples.
_FOLDERS = ("core", "rules", "modules", "streams", "experts", "families")
_CODE = (*_FOLDERS, "calibration.py", "problem.py", "trust.py")
# Settings that do not affect the result. Samples and weights are compared directly.
_WITHOUT_EFFECT = {*SETTINGS_OF_THE_RUN, "family"}
_LABELS = {
    "settings": "method.{}",
    "weights": "weights of {}",
    "model": "merged model's {}",
    "samples": "samples of task {}",
    "precision": "precision: {}",
    "software": "version of {}",
}
_DIGESTS = ("weights", "model", "samples")


def describe_settings(settings: FeatCalSettings) -> dict[str, Any]:
    """Return the settings that affect a result."""
    values = settings.as_dict()
    return {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT}


def describe_run(
    problem: Any, settings: FeatCalSettings, processes: Processes
) -> dict[str, dict[str, Any]]:
    """Return all inputs of a calibration, fit for JSON.

    For base and experts, names, shapes and first rows are compared, not every value.

    Args:
        problem: The `Problem` before its first solve.
        settings: Settings.
        processes: The processes, whose samples and weights are included.
    """
    merged, runner = problem.merged, problem.streams.runner
    models = {
        f"{'base' if name == BASE else 'expert'} {name} (modelpool.models.{name})": model.source
        for name, model in problem.weights.models.items()
    }
    texts = {"rule": repr(problem.rule), "family": repr(runner.family)}
    stages, device = [list(stage) for stage in runner.stages], runner.device
    with runner.autocast():
        on = torch.is_autocast_enabled(device.type)
        autocast = str(torch.get_autocast_dtype(device.type)) if on else None
    weights = {name: glimpse(source) for name, source in models.items()}
    weights = {"the merged model": describe_merged(problem.working, merged), **weights}
    samples = _joined(processes.gather(describe_samples(problem.streams.tasks)))
    return {
        "settings": describe_settings(settings),
        "run": {
            "tasks (modelpool.models)": list(samples),
            **{name: without_addresses(text) for name, text in texts.items()},
            "number of processes (fabric.devices x fabric.num_nodes)": processes.size,
        },
        "model": {**describe_model(merged), "blocks": stages},
        "weights": _joined(processes.gather(weights)),
        "samples": samples,
        "precision": {
            "device": device.type,
            "autocast": autocast,
            "products": products_in_force(),
            "linear_kernel": problem.kernel,
        },
        "software": describe_software(_PACKAGES, _CODE),
        "machine": describe_machine(device),
    }


def describe_merged(working: WorkingModel, merged: nn.Module) -> str:
    """Return a digest of the merged model's values if in memory, else of names and first rows."""
    if not working.is_in_memory:
        return glimpse(working.source)
    tensors = dict(merged.named_buffers()) | merged.state_dict()
    return digest_json({name: digest_tensor(tensor) for name, tensor in tensors.items()})


def _joined(gathered: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Join digests of all processes. A model or task may be in several of them."""
    joined: dict[str, list[str]] = {}
    for of_process in gathered:
        for name, text in of_process.items():
            joined.setdefault(name, []).append(text)
    return {name: " ".join(dict.fromkeys(texts)) for name, texts in joined.items()}


def glimpse(source: ExpertSource) -> str:
    """Return a digest of names, shapes and first rows of a model's tensors."""
    digest = hashlib.sha256()
    for name in sorted(source.names()):
        shape = source.shape(name)
        rows = digest_tensor(rows_of(source, name, 0, 1) if shape else source.tensor(name))
        digest.update(f"{name} {shape} {rows}\n".encode())
    return digest.hexdigest()[:32]


def describe_samples(samples: Mapping[str, Iterable[Batch]]) -> dict[str, str]:
    """Return a digest of each task's batches."""
    digests = {task: InputsDigest() for task in samples}
    for task, batches in samples.items():
        for batch in batches:
            digests[task].add(batch.inputs)
    return {task: digest.text() for task, digest in digests.items()}


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return machine properties that only affect rounding."""
    return {
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each difference of a fingerprint, or of some entries, to an earlier one.

    Args:
        then: The earlier one. It may have any content if its file is damaged.
        now: Entries of this run.
    """
    phrases = []
    for part, values in now.items():
        before = then.get(part)
        before = before if isinstance(before, Mapping) else {}
        for key in sorted({*before, *values}):
            old, new = _text(before.get(key)), _text(values.get(key))
            if old != new:
                label = _LABELS.get(part, "{}").format(_text(key)[1:-1][:100])
                brief = part not in _DIGESTS and len(old + new) <= 400
                phrases.append(label + f" ({old} then, {new} now)" * brief)
    return phrases


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
