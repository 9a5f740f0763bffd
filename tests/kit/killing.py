"""Processes that kill themselves, or whose disk is full, while they write a file."""

import itertools
import os
import resource
import signal
import stat
from pathlib import Path
from typing import Any

MOMENTS = ("while writing", "before renaming", "after renaming")


def finished_blocks(folder: Path) -> int:
    """Number of finished blocks in a folder."""
    return len(list(folder.glob("block-*.safetensors")))


def largest_file(size: int) -> None:
    """Let the system refuse files above some size, as a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def die_at(moment: str, count: int) -> None:
    """Replace functions that write: in this process, call number `count` of one kills it."""
    sync, replace, calls = os.fsync, os.replace, itertools.count()

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if moment == MOMENTS[0] and stat.S_ISREG(status.st_mode) and next(calls) == count:
            os.ftruncate(descriptor, status.st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    def replaced(source: Any, target: Any) -> None:
        is_turn = moment != MOMENTS[0] and next(calls) == count
        if moment == MOMENTS[2] or not is_turn:
            replace(source, target)
        if is_turn:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync, os.replace = fsync, replaced
