"""Digests of local models and data, by the content of their files."""

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

END_BYTES = 2**16
"""Bytes at each end of a file that are digested if all files together have `WHOLE` or more."""


def digest_model(model: ModelFiles) -> str:
    """Return the digest of a model: of its weights, its config and the other files that are used.

    Raises:
        CalibrationError: If the model cannot be read.
    """
    files, digests = used_files(model.folder), dict[str, str]()
    if (weights := model.weights) is not None:
        digests = {"config.json": digest_json(model.config), "weights": weights.digest}
        # Weights of sentence-transformers' other modules are in folders.
        files = {n: f for n, f in files.items() if "/" in n or not n.endswith(".safetensors")}
    return digest_files(files, digests)


def digest_data(location: str) -> str | None:
    """Return the digest of a local file or folder and its split, or None if there is no such path.

    Files that a table names, such as images and sounds, are included if the table is small.
    """
    folder, _, split = location.rpartition(":")
    candidates = [(location, ""), (f"{folder}/{split}", ""), (folder, split)][: 3 if folder else 1]
    for candidate, split_name in candidates:
        if os.path.exists(path := os.path.expanduser(candidate)):
            files = list_files(Path(path))
            if _total_size(files) < WHOLE:
                files |= _named_files(location, Path(path).parent)
            return digest_files(files, {"split": split_name})
    return None


def digest_local(location: str) -> str | None:
    """Return the digest of a local model or of local data, or None if there is no such path.

    Models that cannot be opened are digested like data.
    """
    folder = os.path.expanduser(location)
    if any(os.path.isfile(f"{folder}/{name}config.json") for name in ("", "adapter_")):
        with suppress(CalibrationError):
            return digest_model(ModelFiles(Path(folder), location))
    return digest_data(location)


def digest_files(files: Mapping[str, Path], digests: Mapping[str, str] | None = None) -> str:
    """Return the digest of files (name -> file). Known `digests` replace files of their names."""
    digest = digest_file if _total_size(files) < WHOLE else _digest_ends
    return digest_json({**{name: digest(file) for name, file in files.items()}, **(digests or {})})


def used_files(folder: Path, *, weights: bool = True) -> dict[str, Path]:
    """Return name -> file, for the files in a model's folder that this package reads."""
    files = list_files(folder)
    return {name: files[name] for name in needed_files(files, weights=weights)}


def list_files(path: Path) -> dict[str, Path]:
    """Return name -> file, for all files in a folder and its subfolders, or for one file.

    Hidden files and caches of `datasets` are left out. Links to folders are followed.
    """
    names = glob("**", root_dir=path, recursive=True) if path.is_dir() else [""]
    names = [name for name in names if not os.path.basename(name).startswith("cache-")]
    return {Path(n).as_posix(): path / n for n in names if os.path.isfile(path / n)}


def _named_files(location: str, home: Path) -> dict[str, Path]:
    """Return text -> file, for texts in a table that name files relative to the folder `home`."""
    rows: Any = []
    with suppress(CalibrationError, OSError, ValueError):  # no table
        rows = load_texts(location)
    if not isinstance(rows, list):  # a dataset, which would decode images
        table = rows.data.table
        texts = [field.name for field in table.schema if "string" in str(field.type)]
        rows = table.select(texts).to_pylist()
    # A file that is embedded as bytes is one leaf, because its path names no other file.
    leaves = tree_leaves([*rows], is_leaf=lambda v: isinstance(v, dict) and bool(v.get("bytes")))
    texts = {leaf for leaf in leaves if isinstance(leaf, str)}
    files = {text: home / os.path.expanduser(text) for text in texts}
    # Texts may name system files, such as those in /proc, which have no size.
    return {t: file for t, file in files.items() if os.path.isfile(file) and os.path.getsize(file)}


def _total_size(files: Mapping[str, Path]) -> int:
    return sum(file.stat().st_size for file in files.values())


def _digest_ends(file: Path) -> str:
    """Return the digest of a file's size, first bytes and last bytes."""
    with file.open("rb") as stream:
        begin, size = stream.read(END_BYTES), stream.seek(0, os.SEEK_END)
        stream.seek(max(len(begin), size - END_BYTES))
        return hashlib.sha256(b"%d %b %b" % (size, begin, stream.read())).hexdigest()
