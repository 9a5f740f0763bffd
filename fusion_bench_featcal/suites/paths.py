"""Paths of the bundled suites. Hydra's plugin imports this file: standard library only."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

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
        existing = ", ".join(sorted(entry.name for entry in SUITE_ROOT.glob("*/*")))
        raise FileNotFoundError(
            f"the bundled suites have no {relative!r} below {SUITE_ROOT}; there are: {existing}"
        )
    return str(resolved)


def pick(entries: Mapping[str, T], name: str, kind: str) -> T:
    """Return the entry of a name. A ValueError lists the names."""
    if name not in entries:
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(entries)}")
    return entries[name]
