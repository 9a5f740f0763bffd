"""Digests of what results are made from: model files, source code, items of data sets."""

import hashlib
import json
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions, version
from inspect import getmro, isclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from hydra.utils import get_object
from PIL import Image
from torch import Tensor

import fusion_bench_featcal
from fusion_bench_featcal.checkpoints.fingerprint import digest_tensor
from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.fusionbench.options import plain

log = logging.getLogger(__name__)

_LENGTH = 32  # hexadecimal digits: 128 bits
_LARGE = 2**30  # bytes of a folder whose digest takes seconds
_OWN_FOLDER = Path(fusion_bench_featcal.__file__).resolve().parent
_INSTALLED = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]


class FileDigests:
    """SHA-256 of files, each read once in a run.

    Nothing is remembered from one run to the next: size and time of a file do not tell that its
    content is the same.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._digests: dict[Path, str] = {}

    def file(self, path: Path) -> str:
        """Digest of one file's bytes."""
        path = path.resolve()
        if path not in self._digests:
            with path.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256")
            self._digests[path] = found.hexdigest()[:_LENGTH]
        return self._digests[path]

    def folder(self, folder: Path) -> dict[str, str]:
        """Name -> digest of the files that lie directly in a folder."""
        files = [path for path in sorted(folder.iterdir()) if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        if size > _LARGE and not {path.resolve() for path in files} <= self._digests.keys():
            log.info("digesting the files of %s, %.1f GB", folder, size / 1e9)
        return {path.name: self.file(path) for path in files}

    def named_in(self, value: Any) -> dict[str, Any]:
        """Digests of all files and folders that a plain config names, by their paths there.

        Keys that say where something is saved or cached are left out.
        """
        digests: dict[str, Any] = {}
        for text in dict.fromkeys(_texts(value)):
            path = Path(text).expanduser()
            if _exists(path):
                digests[text] = self.folder(path) if path.is_dir() else self.file(path)
        return digests


def describe_code(value: Any, files: FileDigests) -> dict[str, str]:
    """Code that every `_target_` of a config runs, and that of classes.

    Args:
        value: A config, or classes and functions, or a list of such.
        files: Digests of files.

    Returns:
        Module -> digest of its source file, or the version of the installed package it belongs to.
        This package's own code is not among it: `describe_software` has it.
    """
    found: dict[str, str] = {}
    for target in _targets(value):
        for name in _modules_of(target):
            code = _code_of_module(name, files)
            if code is not None:
                found[name] = code
    return dict(sorted(found.items()))


def digest_rows(rows: Any, indices: Iterable[int] | None = None) -> str:
    """Digest of items as a data set holds them: nothing is decoded, files are read.

    Args:
        rows: A data set with a length and numbered items.
        indices: The items, in order; None: all.

    Returns:
        The digest of the items' content and labels.

    Raises:
        TypeError: If the data set has no numbered items, or an item holds something without
            content of its own, such as a function.
    """
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise TypeError(f"{type(rows).__name__} has no numbered items")
    root = rows.root if isinstance(rows, ImageItems) else None
    if isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom":
        rows = _undecoded(rows)
    digest = hashlib.sha256()
    for index in range(len(rows)) if indices is None else indices:
        _add(digest, rows.read(index) if isinstance(rows, ImageItems) else rows[index], root)
    return digest.hexdigest()[:_LENGTH]


def _undecoded(rows: datasets.Dataset) -> datasets.Dataset:
    for name, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
    return rows.with_format(None)


def _add(digest: Any, value: Any, root: Path | None) -> None:
    if isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}\n".encode())
        for key in sorted(value, key=str):
            digest.update(f"{key}\n".encode())
            _add(digest, value[key], root)
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)}\n".encode())
        for entry in value:
            _add(digest, entry, root)
    elif isinstance(value, bytes):
        digest.update(b"bytes %d\n" % len(value) + value)
    elif isinstance(value, str | Path):
        digest.update(f"text {len(str(value))} {value}\n".encode(errors="surrogatepass"))
        path = (root or Path()) / Path(value).expanduser() if "\0" not in str(value) else Path()
        if os.path.isfile(path):  # unlike Path.is_file, false for texts too long to be paths
            digest.update(path.read_bytes())
    elif isinstance(value, Image.Image):
        digest.update(f"picture {value.mode} {value.size}\n".encode() + value.tobytes())
    elif isinstance(value, Tensor):
        digest.update(f"tensor {digest_tensor(value)}\n".encode())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"array {value.dtype} {value.shape}\n".encode() + value.tobytes())
    elif value is None or isinstance(value, bool | int | float | np.generic):
        digest.update(f"{type(value).__name__} {value!r}\n".encode())
    else:
        raise TypeError(f"an item holds a {type(value).__name__}")


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


def _exists(path: Path) -> bool:
    return str(path) not in ("", ".", "..") and os.path.exists(path)


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
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
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
    path = Path(file).resolve()
    if name.partition(".")[0] in sys.stdlib_module_names or path.is_relative_to(_OWN_FOLDER):
        return None
    # A package that is installed in place, for development, changes without a new version.
    if any(path.is_relative_to(folder) for folder in _INSTALLED):
        installed = _distributions().get(name.partition(".")[0])
        if installed:
            return f"{installed[0]} {version(installed[0])}"
    return files.file(path)


@cache
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


def config_text(value: Any) -> str | None:
    """A config as text, if all of it is plain; None if it holds objects."""
    try:
        return json.dumps(plain(value), sort_keys=True)
    except (TypeError, ValueError):
        return None
