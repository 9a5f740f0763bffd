"""Devices that a user names, their memory, and messages where it runs out."""

import ctypes
import errno
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import torch

from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.run.memory import peak_memory


def check_cuda(name: str, setting: str) -> None:
    """Refuse a GPU where torch has none. CUDA is not initialised, as processes may be forked.

    Args:
        name: A device, such as `cpu`, `cuda:1` or Fabric's `gpu`.
        setting: The setting with its value, for the message.

    Raises:
        ValueError: If torch cannot use it, with the way out.
    """
    if name.partition(":")[0] not in ("cuda", "gpu") or torch.cuda.is_available():
        return
    if torch.version.cuda is None and torch.version.hip is None:
        raise ValueError(
            f"{setting}: this torch ({torch.__version__}) has no CUDA. Leave it out, or install a "
            "torch with CUDA (https://pytorch.org)"
        )
    raise ValueError(
        f"{setting}: torch finds no GPU. Leave it out, or check the driver (nvidia-smi)"
    )


def check_device(name: str, setting: str) -> None:
    """Refuse a device that torch cannot use. Arguments and errors are those of `check_cuda`."""
    check_cuda(name, setting)
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # a build without the device asserts
        raise ValueError(f"{setting} cannot be used: {first_line(error)}") from error


@contextmanager
def isolated_torch_state() -> Iterator[None]:
    """Context of a run, whatever the caller's: no autocast, no inference mode, tensors on the CPU.

    Nothing changes for other threads. The default dtype, which all threads share, is left alone:
    every tensor of this package is made in a named one.
    """
    # Hooks compare tensor versions, and training needs them: inference mode lacks them.
    with torch.inference_mode(False), ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps", "xpu")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":  # a mode, which slows all calls of torch
            stack.enter_context(torch.device("cpu"))
        yield


_PHRASES = ("allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "bad_alloc")
"""Phrases in out-of-memory errors of torch, its libraries, and the system for mapped files."""


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of torch's allocator on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory() or psutil.Process().memory_info().rss  # Windows has no record of the peak


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
    return (
        f"out of memory ({device.type}) at {location}: {first_line(error)}. To use less, set "
        f"{option('activations', 'host')} (with a GPU), lower {option('batch_size')} or "
        f"{option('samples_per_task')}, or exclude the widest modules with {option('modules')}"
    )


_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device, or None if unknown.

    On a CPU the limit of a container counts too.
    """
    if device.type == "cpu":
        available = psutil.virtual_memory().available
        return min(available, _left_in_container() or available)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return None


def _left_in_container() -> int | None:
    """Return the bytes available under a container's limit, or None without a limit."""
    files = (_CGROUP / f"memory.{name}" for name in ("max", "current", "stat"))
    try:
        limit, used, statistics = (file.read_text(encoding="ascii") for file in files)
        # The page cache counts as used, but is released when memory is needed.
        sizes = dict(line.split() for line in statistics.splitlines())
        cached = sum(int(sizes.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
        return max(int(limit) - int(used) + cached, 1)
    except (OSError, ValueError):  # "max" is not a number
        return None
