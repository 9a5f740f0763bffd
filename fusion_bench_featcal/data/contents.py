"""Digests of local models and data, by the content of their files."""

import os
from collections.abc import Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_leaves

from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files import digest_file
from fusion_bench_featcal.files.json_files import digest_json
from fusion_bench_featcal.models.hub import needed_files
from fusion_bench_featcal.models.model_files import ModelFiles


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

    Files that a table names, such as images and sounds, are included.
    """
    folder, _, split = location.rpartition(":")
    candidates = [(location, ""), (f"{folder}/{split}", ""), (folder, split)][: 3 if folder else 1]
    for candidate, split_name in candidates:
        if os.path.exists(path := os.path.expanduser(candidate)):
            files = list_files(Path(path)) | _named_files(location, Path(path).parent)
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
    return digest_json({**{n: digest_file(file) for n, file in files.items()}, **(digests or {})})


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
    if isinstance(rows, list):
        tables: Any = [[*rows]]
    else:  # a dataset, which would decode images
        table = rows.data.table
        columns = [field.name for field in table.schema if "string" in str(field.type)]
        tables = (batch.to_pylist() for batch in table.select(columns).to_batches())
    files = dict[str, Path]()
    for table_rows in tables:
        # A file that is embedded as bytes is one leaf, because its path names no other file.
        leaves = tree_leaves(
            table_rows, is_leaf=lambda value: isinstance(value, dict) and bool(value.get("bytes"))
        )
        texts = {leaf for leaf in leaves if isinstance(leaf, str)}
        named = ((text, home / os.path.expanduser(text)) for text in texts - files.keys())
        # Texts may name system files, such as those in /proc, which have no size.
        files |= {t: file for t, file in named if os.path.isfile(file) and os.path.getsize(file)}
    return files
