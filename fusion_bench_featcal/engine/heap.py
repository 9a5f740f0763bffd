"""Memory that a block has freed stays with the process until the calibration ends.

glibc gives large pieces back to the system as soon as they are free, and the next batch's features
are as large: on a virtual machine, up to a fifth of a calibration was the system's time for making
the same pages anew. It holds for the whole process while it lasts.
"""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h has them
_NEVER = -1  # is memory given back
_LARGEST_HELD = 2**30
_ADJUSTED = 2**26, 2**25  # the most that glibc's own adjustment comes to


@contextmanager
def holding_freed_memory(device: torch.device) -> Iterator[None]:
    """Context in which glibc keeps what is freed, where blocks run on the CPU.

    Where the environment says how memory is allocated, it is left at that.

    Args:
        device: Where blocks run.
    """
    libc = glibc()
    if libc is None or device.type != "cpu" or _is_chosen():
        yield
        return
    trim, mmap = _ADJUSTED
    # glibc before 2.35 takes no more than its own adjustment would come to
    if not libc.mallopt(_MMAP_THRESHOLD, _LARGEST_HELD):
        libc.mallopt(_MMAP_THRESHOLD, mmap)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, mmap)
        libc.mallopt(_TRIM_THRESHOLD, trim)
        libc.malloc_trim(0)


def _is_chosen() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ)


@cache
def glibc() -> Any:
    """The C library, if it is glibc; else None."""
    if platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
