"""Free memory, and messages for out-of-memory errors."""

import ctypes
import errno
import platform
import sys

import psutil
import torch

from fusion_bench_featcal.errors.words import option

_PHRASES = ("allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "bad_alloc")
"""Phrases in out-of-memory errors of torch, its libraries, and the system for mapped files."""


def peak_bytes(device: torch.device) -> int:
    """Return the largest memory so far: of torch's allocator on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # on Windows
        return psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes


def return_freed_memory() -> None:
    """Let this process give freed blocks of 1 MiB or more back to the system at once.

    By default glibc keeps blocks of up to 32 MiB for later, which leaves holes between matrices of
    different sizes. Other C libraries have no such setting.
    """
    if platform.libc_ver()[0] == "glibc":
        mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return any(phrase in str(error) for phrase in _PHRASES)


def memory_cause(device: torch.device, location: str, error: Exception) -> str | None:
    """Return where memory ran out and the settings to lower, or None for other errors.

    Args:
        device: Device of the computation.
        location: The block and task that are processed.
        error: The error.
    """
    if not is_out_of_memory(error):
        return None
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"out of memory ({device.type}) at {location}: {reason}. What lowers it: "
        f"{option('activations', 'host')} beside a GPU, a lower {option('batch_size')} or "
        f"{option('samples_per_task')}, {option('modules')} without the widest modules"
    )
