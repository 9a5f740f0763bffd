"""Fingerprint of a result: a short text that changes with any of the result's inputs."""

import hashlib
import json
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions, version
from inspect import getmro, isclass
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool, BaseTaskPool
from hydra.utils import get_object
from torch import nn

import fusion_bench_featcal
from fusion_bench_featcal.digests import (
    InputsDigest,
    describe_model,
    digest_file,
)
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import PoolModels

log = logging.getLogger(__name__)

NUMBERS_VERSION = 3
"""Version of the code behind results. Increase it if a result or a cost can change."""
_LENGTH = 20  # hexadecimal digits of a fingerprint
_LARGE = 2**30  # bytes of a folder that takes seconds to digest
_PACKAGES = ("fusion-bench", "torch", "transformers")
_OWN_FOLDER = Path(fusion_bench_featcal.__file__).resolve().parent
_INSTALLED = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]


def fingerprint(*values: Any) -> str:
    """Return the digest of any value that `describe` supports. Equal values have equal digests."""
    text = json.dumps([describe(value) for value in values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def describe(value: Any) -> Any:
    """Return the JSON form of a config: mappings, sequences and scalars, plain or of OmegaConf.

    A module is described by its class and weights, any other object by its class and, if it has
    one, its length.
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


class FileDigests:
    """SHA-256 of files, each read once per run.

    Digests are not reused between runs, because equal size and time do not prove equal content.
    """

    def __init__(self) -> None:
        self._digests: dict[Path, str] = {}

    def file(self, path: Path) -> str:
        """Return the digest of one file's bytes."""
        path = path.resolve()
        if path not in self._digests:
            self._digests[path] = digest_file(path)
        return self._digests[path]

    def folder(self, folder: Path) -> dict[str, str]:
        """Return name -> digest of the files directly in a folder."""
        files = [path for path in sorted(folder.iterdir()) if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        if size > _LARGE and not {path.resolve() for path in files} <= self._digests.keys():
            log.info("digesting the files of %s, %.1f GB", folder, size / 1e9)
        return {path.name: self.file(path) for path in files}

    def named_in(self, config: Any) -> dict[str, Any]:
        """Return digests of all files and folders in a plain config, by their paths there.

        Keys with locations for saving or caching are ignored.
        """
        digests: dict[str, Any] = {}
        for text in dict.fromkeys(_texts(config)):
            path = Path(text).expanduser()
            if str(path) not in ("", ".", "..") and os.path.exists(path):
                digests[text] = self.folder(path) if path.is_dir() else self.file(path)
        return digests


def describe_pool(modelpool: BaseModelPool, files: FileDigests) -> dict[str, Any]:
    """Return a pool's config without its data, its code, and the content of its model files.

    Data are part of the fingerprint by the samples drawn (`DataDigests`). Hub models are read from
    the cache or downloaded.
    """
    config = describe(modelpool.config)
    config = {key: value for key, value in config.items() if not key.endswith("_datasets")}
    return {
        "class": type(modelpool).__qualname__,
        "config": config,
        "files": files.named_in(config),
        "models": {
            name: [files.folder(path) for path in model.folders if path.is_dir()]
            for name, model in PoolModels(modelpool).items()
        },
        "code": describe_code([type(modelpool), modelpool.config], files),
    }


def describe_task_pool(taskpool: BaseTaskPool, files: FileDigests) -> dict[str, Any]:
    """Return a task pool's config, its code, and the content of its models and tokenizers."""
    config = describe(taskpool.config)
    named = {k: v for k, v in config.items() if k not in ("tasks", "test_datasets")}
    return {
        "config": config,
        "files": files.named_in(named),
        "code": describe_code([type(taskpool), taskpool.config], files),
    }


def describe_makers() -> dict[str, Any]:
    """Return versions of the packages that affect results, and `NUMBERS_VERSION`."""
    return {"numbers": NUMBERS_VERSION} | {package: version(package) for package in _PACKAGES}


def describe_code(value: Any, files: FileDigests) -> dict[str, str]:
    """Return the code that every `_target_` of a config runs, and the code of classes.

    Args:
        value: A config, or classes and functions, or a list of such.
        files: Digests of files.

    Returns:
        Module -> digest of its source file, or the version of its installed package. This package's
        code is excluded: `NUMBERS_VERSION` represents it.
    """
    modules = {name for target in _targets(value) for name in _modules_of(target)}
    code = {name: _code_of_module(name, files) for name in sorted(modules)}
    return {name: text for name, text in code.items() if text is not None}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not re.search("save|cache|log|out", str(key)):
                yield from _texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, str):
        yield value


def _targets(value: Any) -> Iterator[Any]:
    """Yield classes and functions in a config's `_target_` keys. Unknown ones are skipped."""
    value = plain(value)
    if isinstance(value, Mapping):
        target = value.get("_target_")
        if isinstance(target, str):
            try:
                yield get_object(target)
            except Exception:  # instantiating the target reports the error
                log.debug("no code found for %s", target)
        for entry in value.values():
            yield from _targets(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _targets(entry)
    elif callable(value):
        yield value


def _modules_of(target: Any) -> list[str]:
    """Return the module of a function, or the modules of a class and its base classes."""
    owner = getattr(target, "__self__", target)  # a class method such as `from_pretrained`
    if isclass(owner):
        return [kind.__module__ for kind in getmro(owner)]
    return [getattr(target, "__module__", None) or type(target).__module__]


def _code_of_module(name: str, files: FileDigests) -> str | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        if name == "__main__":
            log.info("code typed at a prompt or in a notebook is not part of fingerprints")
        return None
    path, package = Path(file).resolve(), name.partition(".")[0]
    if package in sys.stdlib_module_names or path.is_relative_to(_OWN_FOLDER):
        return None
    # A package in editable mode changes without a new version.
    if any(path.is_relative_to(folder) for folder in _INSTALLED):
        installed = _distributions().get(package)
        if installed:
            return f"{installed[0]} {version(installed[0])}"
    return files.file(path)


_distributions = cache(packages_distributions)
