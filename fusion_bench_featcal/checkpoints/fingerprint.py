"""Description of all that a calibration depends on: to be kept, compared and explained."""

import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.float32_products import products_in_force
from fusion_bench_featcal.settings import SETTINGS_OF_THE_RUN, FeatCalSettings

_SHORT = 32  # hexadecimal digits: 128 bits, beyond any accident
_PACKAGES = ("torch", "transformers", "safetensors", "fusion-bench-featcal")
# Parts of this package that make a block's parameters from weights and samples.
_CODE = ("core", "engine", "families", "checkpoints", "calibration.py", "experts")
# Settings without a part in the result: samples and weights are compared themselves.
# What `linear_kernel` came to is told under `precision`.
_WITHOUT_EFFECT = {*SETTINGS_OF_THE_RUN, "family", "linear_kernel"}
_TRANSIENT = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def describe_settings(settings: FeatCalSettings) -> dict[str, Any]:
    """The settings that a result depends on."""
    values = settings.as_dict()
    return {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT}


def describe_run(
    merged: nn.Module,
    family: Any,
    stages: Sequence[Sequence[str]],
    settings: FeatCalSettings,
    models: Sequence[str],
    autocast: Callable[[], AbstractContextManager[Any]],
    kernel: str,
    device: torch.device,
) -> dict[str, Any]:
    """Everything that a calibration depends on but its samples and the weights it reads by block.

    Args:
        merged: The merged model, as it is shown to the calibration.
        family: How it is cut into blocks.
        stages: Its blocks.
        settings: Settings.
        models: Names of the base, if there is one, and of the experts in order: sums are rounded in
            it.
        autocast: Makes the context of forward passes.
        kernel: What multiplies matrices on the CPU.
        device: Where it is computed.

    Returns:
        A JSON-able mapping. `machine` tells what may change the rounding and no more.
    """
    tensors = dict(merged.named_buffers()) | merged.state_dict()
    return {
        "settings": describe_settings(settings),
        "models": list(models),
        "family": {"name": family.name, "options": _ADDRESS.sub("", repr(family))},
        "blocks": [list(stage) for stage in stages],
        "merged": describe_model(merged),
        "weights": {name: digest_tensor(t) for name, t in tensors.items()},
        "precision": _describe_precision(device, autocast) | {"linear_kernel": kernel},
        "software": _describe_software(),
        "machine": _describe_machine(device),
    }


def digest_tensor(tensor: Tensor) -> str:
    """Digest of a tensor's dtype, shape and content."""
    digest = hashlib.sha256()
    _update(digest, "", tensor)
    return digest.hexdigest()[:_SHORT]


def glimpse(model: nn.Module) -> str:
    """Digest of a few values of each of a model's tensors: what tells two models apart quickly."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        _update(digest, name, flat[:: max(1, len(flat) // 256)])
    return digest.hexdigest()[:_SHORT]


class InputsDigest:
    """Digest of a stream of model inputs."""

    def __init__(self) -> None:
        """Start with none."""
        self._digest = hashlib.sha256()

    def add(self, inputs: Any) -> None:
        """Add one batch: a tensor, or a mapping or tuple of tensors and plain values."""
        if isinstance(inputs, Mapping):
            entries: Iterator[tuple[Any, Any]] = iter(sorted(inputs.items()))
        else:
            entries = enumerate(inputs if isinstance(inputs, tuple) else (inputs,))
        self._digest.update(b"batch\n")
        for name, value in entries:
            if isinstance(value, Tensor):
                _update(self._digest, str(name), value)
            else:
                self._digest.update(f"{name} {_ADDRESS.sub('', repr(value))}\n".encode())

    def text(self) -> str:
        """The digest of all that was added."""
        return self._digest.hexdigest()[:_SHORT]


def _update(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy())


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Class, modules and config: what a model computes besides its weights."""
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else None
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "modules": hashlib.sha256(_ADDRESS.sub("", repr(model)).encode()).hexdigest()[:_SHORT],
        "config": _plain(values),
        "attention": getattr(config, "_attn_implementation", None),
    }


def _plain(value: Any) -> Any:
    """JSON form that is the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if str(k) not in _TRANSIENT}
    if isinstance(value, set | frozenset):
        return sorted(str(entry) for entry in value)
    if isinstance(value, Sequence):
        return [_plain(entry) for entry in value]
    return _ADDRESS.sub("", str(value))


def _describe_precision(
    device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]
) -> dict[str, Any]:
    """Precision in which forward passes are computed."""
    kind = device.type
    with autocast():
        on = torch.is_autocast_enabled(kind)
        dtype = str(torch.get_autocast_dtype(kind)) if on else None
    return {
        "device": kind,
        "autocast": dtype,
        "products": products_in_force(),
    }


def digest_code(names: Iterable[str]) -> str:
    """Digest of the source of modules and sub-packages of this package, by their file names."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for place in (root / name for name in sorted(names)):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:_SHORT]


@cache
def _describe_software() -> dict[str, str]:
    """Versions of the packages that compute, and a digest of this package's own code."""
    versions = {package: _version(package) for package in _PACKAGES}
    return versions | {"code": digest_code(_CODE)}


def _version(package: str) -> str:
    """Version of a package; a checkout that is not installed is told by its code alone."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


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
    """Differences between two descriptions, one phrase each.

    Args:
        then: What a checkpoint was made with.
        now: The same, or some of its entries, as they are now.
    """
    differing: list[str] = []
    for part, value in now.items():
        before = then.get(part)
        if _text(before) == _text(value):
            continue
        label = _LABELS.get(part, part)
        if part == "weights":
            differing.append(f"weights of the merged model ({_differing(before, value)})")
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


def _differing(then: Any, now: Mapping[str, str]) -> str:
    before = then if isinstance(then, Mapping) else {}
    names = [name for name in now if before.get(name) != now[name]]
    names += [name for name in before if name not in now]
    return f"{len(names)} of {len(now)} tensors, the first is {names[0]}"
