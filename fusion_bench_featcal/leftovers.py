"""Temporary files and folders that name the process they belong to, so that orphans can be removed.

A name ends in `<host>-<process id>-<anything>.part` (or `.old`). A process that is killed leaves
them behind; the next one on the same host recognises them.
"""

import contextlib
import itertools
import os
import re
import shutil
import socket
from pathlib import Path

import psutil

PART, OLD = ".part", ".old"
_COUNT = itertools.count()
_OWN: set[str] = set()


def owner_mark() -> str:
    """Return `<host>-<process id>` of this process."""
    return f"{_host()}-{os.getpid()}"


def temporary_neighbour(path: Path) -> Path:
    """Return a hidden name beside `path` that no other process uses; nothing is made."""
    return register(path.with_name(f".{path.name}.{owner_mark()}-{next(_COUNT)}{PART}"))


def register(path: Path) -> Path:
    """Note that this process made `path`, which holds `owner_mark()`; return it.

    A container's first process has the same id in every start, so the id alone does not tell.
    """
    _OWN.add(path.name)
    return path


def orphans(folder: Path, prefix: str = "") -> list[Path]:
    """List what dead processes of this host left in a folder.

    Args:
        folder: The folder; it may be missing.
        prefix: Beginning of the names to look for.
    """
    try:
        return sorted(p for p in folder.iterdir() if p.name.startswith(prefix) and _is_orphan(p))
    except OSError:
        return []


def remove_orphans(folder: Path, prefix: str = "") -> None:
    """Remove what dead processes of this host left in a folder; see `orphans`."""
    for path in orphans(folder, prefix):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder as far as possible; it may be missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_orphan(path: Path) -> bool:
    match = re.search(rf"[.-]{re.escape(_host())}-(\d+)-\w+\.(?:part|old)$", path.name)
    if match is None or path.with_suffix(PART).name in _OWN:
        return False
    pid = int(match[1])
    return pid == os.getpid() or not psutil.pid_exists(pid)


def _host() -> str:
    return re.sub(r"[^0-9A-Za-z-]", "-", socket.gethostname())[:40]
