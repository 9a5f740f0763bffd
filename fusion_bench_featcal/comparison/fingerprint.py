"""Fingerprint of a result: a short text that changes when anything it depends on changes."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool, BaseTaskPool
from torch import nn

import fusion_bench_featcal
from fusion_bench_featcal.checkpoints.fingerprint import InputsDigest, describe_model
from fusion_bench_featcal.comparison.digests import FileDigests, describe_code
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import adapter_paths, checkpoint_path

_LENGTH = 20
_PACKAGES = ("fusion-bench", "torch", "transformers")
# These read results, or start runs; they have no part in making a result.
_NO_PART_IN_RESULTS = {"results", "compare.py", "files.py", "cli.py", "plan", "_hydra_plugin"}


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
        weights = InputsDigest()
        weights.add(value.state_dict())
        return {"class": kind, "model": describe_model(value), "weights": weights.text()}
    return {"class": kind, "length": len(value) if hasattr(value, "__len__") else None}


def describe_pool(modelpool: BaseModelPool, files: FileDigests) -> dict[str, Any]:
    """A pool's config, its code, and the content of the model files that it names.

    Args:
        modelpool: The pool; hub ids of its models are found, or downloaded.
        files: Digests of files.
    """
    config = describe(modelpool.config)
    named = {key: value for key, value in config.items() if not key.endswith("_datasets")}
    folders = {
        name: [str(path) for path in _folders(modelpool, name)]
        for name in modelpool.all_model_names
    }
    return {
        "class": type(modelpool).__qualname__,
        "config": config,
        "files": files.named_in(named),
        "models": {name: [files.folder(Path(p)) for p in paths] for name, paths in folders.items()},
        "code": describe_code([type(modelpool), modelpool.config], files),
    }


def describe_task_pool(taskpool: BaseTaskPool, files: FileDigests) -> dict[str, Any]:
    """A task pool's config, its code, and the files of the models and tokenizers that it names."""
    config = describe(taskpool.config)
    named = {k: v for k, v in config.items() if k not in ("tasks", "test_datasets")}
    return {
        "config": config,
        "files": files.named_in(named),
        "code": describe_code([type(taskpool), taskpool.config], files),
    }


def _folders(modelpool: BaseModelPool, name: str) -> list[Path]:
    """Folders of a model's files: one, or base and adapter."""
    path = checkpoint_path(modelpool, name)
    folders = [path] if path is not None else list(adapter_paths(modelpool, name) or ())
    return [folder for folder in folders if folder.is_dir()]


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
