"""What a result depends on, as one short text: it changes when anything of it changes."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from fusion_bench import BaseModelPool
from torch import nn

import fusion_bench_featcal
from fusion_bench_featcal.boundary.options import plain

_LENGTH = 20
_PACKAGES = ("fusion-bench", "torch", "transformers")
# These read results, or start runs; they have no part in making a result.
_NO_PART_IN_RESULTS = {"compare", "cli.py", "plan", "_hydra_plugin"}


def fingerprint(*parts: Any) -> str:
    """Digest of anything that `describe` understands; equal parts give equal digests."""
    text = json.dumps([describe(part) for part in parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def describe(value: Any) -> Any:
    """JSON form of a config.

    Args:
        value: Mappings, sequences and scalars, plain or OmegaConf's. A module counts with its class
            and weights; any other object with its class, and with its length if it has one.

    Returns:
        Dictionaries, lists and scalars.
    """
    value = plain(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [describe(entry) for entry in value]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, nn.Module):
        return {"class": kind, "weights": _digest(value)}
    return {"class": kind, "length": len(value) if hasattr(value, "__len__") else None}


def describe_pool(modelpool: BaseModelPool) -> dict[str, Any]:
    """A pool's config, and sizes and times of the model files it names."""
    return {
        "class": type(modelpool).__qualname__,
        "config": describe(modelpool.config),
        "files": _stamps(describe(modelpool._models)),
    }


@cache
def describe_software() -> dict[str, str]:
    """Versions of the packages that make results, and a digest of this package's own code."""
    return {package: version(package) for package in _PACKAGES} | {"code": _code()}


def _code() -> str:
    root = Path(fusion_bench_featcal.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if place.parts[0] not in _NO_PART_IN_RESULTS:
            digest.update(f"{place.as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:_LENGTH]


def _stamps(value: Any) -> list[Any]:
    """Name, size and time of the files in every folder that a description names."""
    if isinstance(value, dict):
        return [stamp for entry in value.values() for stamp in _stamps(entry)]
    if isinstance(value, list):
        return [stamp for entry in value for stamp in _stamps(entry)]
    if not isinstance(value, str) or not Path(value).is_dir():
        return []
    files = [path for path in sorted(Path(value).iterdir()) if path.is_file()]
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _digest(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:_LENGTH]
