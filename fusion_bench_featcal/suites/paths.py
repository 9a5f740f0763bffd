"""Paths of the bundled suites. Hydra's plugin imports this file: standard library only."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

WEIGHTS = "FEATCAL_REAL"
"""Environment variable with the folder of fetched weights (default: `weights`)."""
SUITE_ROOT = Path(__file__).resolve().parent / "data"


def suite_path(relative: str) -> str:
    """Return the absolute path of a file or folder of the suites: `clip-vit-mini/mini_mnist`.

    Raises:
        ValueError: If the path leaves the suites' data folder.
        FileNotFoundError: If the suites have no such file or folder.
    """
    resolved = (SUITE_ROOT / relative).resolve()
    if not resolved.is_relative_to(SUITE_ROOT):
        raise ValueError(f"suite path {relative!r} leaves the suites' folder {SUITE_ROOT}")
    if not resolved.exists():
        existing = ", ".join(sorted(entry.name for entry in SUITE_ROOT.iterdir() if entry.is_dir()))
        raise FileNotFoundError(
            f"the bundled suites have no {relative!r} below {SUITE_ROOT}; there are: {existing}"
        )
    return str(resolved)


def weights_path(name: str) -> str:
    """Return the folder of pretrained weights that were fetched into `$FEATCAL_REAL`.

    Raises:
        FileNotFoundError: If they are not there, with the command that fetches them.
    """
    root = os.environ.get(WEIGHTS, "")
    folder = Path(root or "weights").expanduser().absolute() / name
    if not (folder / "config.json").is_file():
        where = f"{WEIGHTS}={root}" if root else f"the folder weights ({WEIGHTS} is not set)"
        raise FileNotFoundError(
            f"no pretrained weights {name!r} in {where}: fetch them by `python "
            f"scripts/fetch_weights.py FOLDER {name}` in a source checkout, and set "
            f"{WEIGHTS}=FOLDER"
        )
    return str(folder)


def pick(entries: Mapping[str, T], name: str, kind: str) -> T:
    """Return the entry of a name. A ValueError lists the names."""
    if name not in entries:
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(entries)}")
    return entries[name]
