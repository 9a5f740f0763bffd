"""Fingerprint of a result: a short text that changes when anything it depends on changes."""

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
"""Version of the code that makes numbers: raise it where a result or a cost can change."""
_LENGTH = 20  # hexadecimal digits of a fingerprint
_LARGE = 2**30  # bytes of a folder whose digest takes seconds
_PACKAGES = ("fusion-bench", "torch", "transformers")
_OWN_FOLDER = Path(fusion_bench_featcal.__file__).resolve().parent
_INSTALLED = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]


def fingerprint(*values: Any) -> str:
    """Digest of anything that `describe` understands; equal values give equal digests."""
    text = json.dumps([describe(value) for value in values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def describe(value: Any) -> Any:
    """JSON form of a config: mappings, sequences and scalars, plain or OmegaConf's.

    A module counts with its class and weights; any other object with its class, and with its length
    if it has one.
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
    """SHA-256 of files, each read once in a run.

    Nothing is remembered from one run to the next: size and time of a file do not tell that its
    content is the same.
    """

    def __init__(self) -> None:
        self._digests: dict[Path, str] = {}

    def file(self, path: Path) -> str:
        """Digest of one file's bytes."""
        path = path.resolve()
        if path not in self._digests:
            self._digests[path] = digest_file(path)
        return self._digests[path]

    def folder(self, folder: Path) -> dict[str, str]:
        """Name -> digest of the files that lie directly in a folder."""
        files = [path for path in sorted(folder.iterdir()) if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        if size > _LARGE and not {path.resolve() for path in files} <= self._digests.keys():
            log.info("digesting the files of %s, %.1f GB", folder, size / 1e9)
        return {path.name: self.file(path) for path in files}

    def named_in(self, config: Any) -> dict[str, Any]:
        """Digests of all files and folders that a plain config names, by their paths there.

        Keys that say where something is saved or cached are left out.
        """
        digests: dict[str, Any] = {}
        for text in dict.fromkeys(_texts(config)):
            path = Path(text).expanduser()
            if str(path) not in ("", ".", "..") and os.path.exists(path):
                digests[text] = self.folder(path) if path.is_dir() else self.file(path)
        return digests


def describe_pool(modelpool: BaseModelPool, files: FileDigests) -> dict[str, Any]:
    """A pool's config without its data, its code, and the content of the model files that it names.

    The data count with what is drawn of them (`DataDigests`). Hub ids of its models are found, or
    downloaded.
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
    """A task pool's config, its code, and the files of the models and tokenizers that it names."""
    config = describe(taskpool.config)
    named = {k: v for k, v in config.items() if k not in ("tasks", "test_datasets")}
    return {
        "config": config,
        "files": files.named_in(named),
        "code": describe_code([type(taskpool), taskpool.config], files),
    }


def describe_makers() -> dict[str, Any]:
    """Versions of the packages that make results, and of this package's own numbers."""
    return {"numbers": NUMBERS_VERSION} | {package: version(package) for package in _PACKAGES}


def describe_code(value: Any, files: FileDigests) -> dict[str, str]:
    """Code that every `_target_` of a config runs, and that of classes.

    Args:
        value: A config, or classes and functions, or a list of such.
        files: Digests of files.

    Returns:
        Module -> digest of its source file, or the version of the installed package it belongs to.
        This package's own code is left out: `NUMBERS_VERSION` stands for it.
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
    """Classes and functions that a config names by `_target_`; what is unknown is left out."""
    value = plain(value)
    if isinstance(value, Mapping):
        target = value.get("_target_")
        if isinstance(target, str):
            try:
                yield get_object(target)
            except Exception:  # whoever instantiates it says what is wrong with it
                log.debug("no code found for %s", target)
        for entry in value.values():
            yield from _targets(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _targets(entry)
    elif callable(value):
        yield value


def _modules_of(target: Any) -> list[str]:
    """Modules of a function, or of a class and those it inherits from."""
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
    # A package that is installed in place, for development, changes without a new version.
    if any(path.is_relative_to(folder) for folder in _INSTALLED):
        installed = _distributions().get(package)
        if installed:
            return f"{installed[0]} {version(installed[0])}"
    return files.file(path)


_distributions = cache(packages_distributions)
