"""Class and modules of an encoder's folder, read without importing sentence-transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files.untrusted import parse_json, read_json
from fusion_bench_featcal.models.bases import read_local
from fusion_bench_featcal.models.hub import MODULES

RERANKER = "CrossEncoder"
DEFAULT = "SentenceTransformer"
_CLASS = "config_sentence_transformers.json"


def class_of(folder: Path, config: Mapping[str, object] | None = None) -> str | None:
    """Return the name of the class that opens a folder, or None for models of other libraries.

    Folders of embedding models have a list of their modules. Rerankers of earlier releases have
    only a key in their config.json.

    Args:
        folder: The folder.
        config: The content of its config.json, which is read if it is not given.

    Raises:
        ValueError: If the file with the name is damaged.
    """
    if not (folder / MODULES).is_file():
        content = read_local(str(folder), "config.json") if config is None else config
        return RERANKER if "sentence_transformers" in content else None
    file = folder / _CLASS
    return str(read_json(file).get("model_type", DEFAULT)) if file.is_file() else DEFAULT


def module_folders(folder: Path) -> list[str]:
    """Return the folders of a model's modules, or nothing if it has no list of modules."""
    file = folder / MODULES
    modules: Any = parse_json(file.read_bytes(), file) if file.is_file() else []
    return [str(module["path"]) for module in modules]
