"""Digests of models and data on this machine, by the content of their files."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_leaves

from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.source import WHOLE
from fusion_bench_featcal.files import digest_file
from fusion_bench_featcal.files.json_files import digest_json
from fusion_bench_featcal.models.hub import needed_files
from fusion_bench_featcal.models.model_files import ModelFiles

PART = 2**16
"""Bytes at each end of a file that count if all files together have `WHOLE` bytes or more."""


def digest_model(model: ModelFiles) -> str:
    """Return the digest of a model's files that are used here, of weights as their `digest`.

    Raises:
        CalibrationError: If it cannot be read.
    """
    files, opened = used_files(model.folder), dict[str, str]()
    if (weights := model.weights) is not None:
        opened = {"config.json": digest_json(model.config), "weights": weights.digest}
        # Modules of sentence-transformers are in folders.
        files = {n: f for n, f in files.items() if "/" in n or not n.endswith(".safetensors")}
    return digest_files(files, opened)


def digest_data(location: str) -> str | None:
    """Return the digest of files or a folder here, with the split if one is named, or None.

    Files that a table names, such as images and sounds, count as the table does.
    """
    folder, _, split = location.rpartition(":")
    places = [(location, ""), (f"{folder}/{split}", ""), (folder, split)][: 3 if folder else 1]
    for place, named in places:
        if os.path.exists(path := os.path.expanduser(place)):
            files = files_in(Path(path))
            if _size(files) < WHOLE:
                files |= _named_files(location, Path(path).parent)
            return digest_files(files, {"split": named})
    return None


def digest_local(location: str) -> str | None:
    """Return the digest of a model's folder, or of data, or None if nothing of that name is here.

    Models that cannot be opened here count as data.
    """
    folder = os.path.expanduser(location)
    if any(os.path.isfile(f"{folder}/{name}config.json") for name in ("", "adapter_")):
        with suppress(CalibrationError):
            return digest_model(ModelFiles(Path(folder), location))
    return digest_data(location)


def digest_files(files: Mapping[str, Path], opened: Mapping[str, str] | None = None) -> str:
    """Return the digest of files (name -> file), and of what was opened before, in their place."""
    digest = digest_file if _size(files) < WHOLE else _digest_ends
    return digest_json({**{name: digest(file) for name, file in files.items()}, **(opened or {})})


def used_files(folder: Path, *, weights: bool = True) -> dict[str, Path]:
    """Return name -> file, of those in a model's folder that are used here."""
    files = files_in(folder)
    return {name: files[name] for name in needed_files(files, weights=weights)}


def files_in(path: Path) -> dict[str, Path]:
    """Return name -> file below a folder without hidden ones and caches of `datasets`, or a file.

    As for images of class folders, links to folders are followed.
    """
    names = glob("**", root_dir=path, recursive=True) if path.is_dir() else [""]
    names = [name for name in names if not os.path.basename(name).startswith("cache-")]
    return {Path(n).as_posix(): path / n for n in names if os.path.isfile(path / n)}


def _named_files(location: str, home: Path) -> dict[str, Path]:
    """Return text -> file, of the texts in a table that name a file, from a folder on."""
    rows: Any = []
    with suppress(CalibrationError, OSError, ValueError):  # no table
        rows = load_texts(location)
    if not isinstance(rows, list):  # but a dataset, which would decode images
        table = rows.data.table
        texts = [field.name for field in table.schema if "string" in str(field.type)]
        rows = table.select(texts).to_pylist()
    leaves = tree_leaves([*rows], is_leaf=_is_stored)
    texts = {leaf for leaf in leaves if isinstance(leaf, str)}
    files = {text: home / os.path.expanduser(text) for text in texts}
    # Files of the system, such as those in /proc, have no size, and texts may be their names.
    return {t: file for t, file in files.items() if os.path.isfile(file) and os.path.getsize(file)}


def _is_stored(value: object) -> bool:
    """Return whether a value is a file that a table has as bytes, whose path names no other."""
    return isinstance(value, dict) and bool(value.get("bytes"))


def _size(files: Mapping[str, Path]) -> int:
    return sum(file.stat().st_size for file in files.values())


def _digest_ends(file: Path) -> str:
    """Return the digest of a file's size, begin and end."""
    with file.open("rb") as stream:
        begin, size = stream.read(PART), stream.seek(0, os.SEEK_END)
        stream.seek(max(len(begin), size - PART))
        return hashlib.sha256(b"%d %b %b" % (size, begin, stream.read())).hexdigest()
