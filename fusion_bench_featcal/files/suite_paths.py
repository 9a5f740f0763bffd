"""Folders of the bundled suites and of fetched weights."""

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from fusion_bench_featcal.errors.words import install_advice

T = TypeVar("T")

WEIGHTS_VARIABLE = "FEATCAL_REAL"
"""Environment variable with the folder of fetched weights (default: `weights`)."""
SPEECH_MODEL = "whisper-5s"
"""Name of the base that is made with the speech of its suite."""
PACKAGE = "fusion_bench_featcal_suites"
"""Package with the models and data, a distribution of its own."""


def suite_root() -> Path:
    """Return the data folder of the suites: in a source checkout, or of the installed package.

    Raises:
        FileNotFoundError: If the package is not installed, with the command that installs it.
    """
    checkout = Path(__file__).resolve().parents[2] / "suites" / PACKAGE
    if checkout.is_dir():
        return checkout / "data"
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"the bundled suites are not installed: {install_advice('./suites')}"
        )
    return Path(spec.origin).resolve().parent / "data"


def suite_path(relative: str) -> str:
    """Return the absolute path of a file or folder of the suites: `clip-vit-mini/mini_mnist`.

    Raises:
        ValueError: If the path leaves the suites' data folder.
        FileNotFoundError: If the suites are not installed, or have no such file or folder.
    """
    root = suite_root()
    resolved = (root / relative).resolve()
    if not resolved.is_relative_to(root):
        raise ValueError(f"suite path {relative!r} is outside the suites' folder {root}")
    if not resolved.exists():
        folder = next(parent for parent in resolved.parents if parent.is_dir())
        existing = ", ".join(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
        raise FileNotFoundError(
            f"the bundled suites have no {relative!r}; in {folder} there are: {existing}"
        )
    return str(resolved)


def weights_root() -> Path:
    """Return the folder of fetched weights, which may be missing."""
    return Path(os.environ.get(WEIGHTS_VARIABLE) or "weights").expanduser().absolute()


def without_roots(text: str) -> str:
    """Return a text with the folders of suites and weights by their names, as on all machines."""
    with suppress(FileNotFoundError):
        text = text.replace(str(suite_root()), PACKAGE)
    return text.replace(str(weights_root()), WEIGHTS_VARIABLE)


def weights_path(name: str) -> str:
    """Return the folder of pretrained weights that were fetched into `$FEATCAL_REAL`.

    Raises:
        FileNotFoundError: If they are not there, with the command that fetches them.
    """
    root = weights_root()
    if not (root / name / "config.json").is_file():
        is_made = name == SPEECH_MODEL
        words = "make_speech.py FOLDER" if is_made else f"fetch_weights.py FOLDER {name}"
        raise FileNotFoundError(
            f"no pretrained weights {name!r} in the folder {root}: fetch them with `python "
            f"scripts/{words}` in a source checkout, and set {WEIGHTS_VARIABLE}=FOLDER"
        )
    return str(root / name)


def pick(entries: Mapping[str, T], name: str, kind: str) -> T:
    """Return the entry of a name. A ValueError lists the names."""
    if name not in entries:
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(entries)}")
    return entries[name]
