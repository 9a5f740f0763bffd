"""Free memory, and errors that say it has run out."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)
_PHRASES = (
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",  # the same on Windows
    "Cannot allocate memory",  # the system, in files that are mapped
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated on a device.

    Args:
        device: The device; for the CPU a container's limit counts too.

    Returns:
        Bytes; None where the device does not say.
    """
    if device.type == "cpu":
        limits = [psutil.virtual_memory().available, *filter(None, map(_left_in_group, _CGROUPS))]
        return min(limits)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory has run out, on whatever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return any(phrase in str(error) for phrase in _PHRASES)


@contextmanager
def naming_memory(
    device: torch.device, place: Callable[[], str], advice: Callable[[], str]
) -> Iterator[None]:
    """Context whose errors of lacking memory say where it ran out and what to lower.

    Args:
        device: Where the work is done.
        place: What was being worked on.
        advice: Which settings lower what.

    Raises:
        CalibrationError: In place of an error that says so; all others pass as they are.
    """
    try:
        yield
    except CalibrationError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CalibrationError(
            f"out of memory ({device.type}) at {place()}: {reason}. {advice()}"
        ) from error


def memory_advice(settings: FeatCalSettings, device: torch.device) -> str:
    """Return a sentence that names the settings which lower a calibration's memory."""
    waiting = "host|disk" if device.type != "cpu" else "disk"
    if settings.activations == "host" and device.type != "cpu":
        waiting = "disk"
    ways = [] if settings.activations == "disk" else [f"method.activations={waiting}"]
    ways += ["a lower method.batch_size", "a lower method.samples_per_task"]
    ways += ["method.modules without the widest modules"]
    ways += [] if settings.stream_experts is True else ["method.stream_experts=true"]
    return f"What lowers it: {', '.join(ways)}"


def _left_in_group(files: tuple[str, str, str]) -> int | None:
    """Memory that a container's limit leaves; the page cache is given back when needed."""
    try:
        limit, used, statistics = (Path(file).read_text(encoding="ascii") for file in files)
        cached = dict(line.split() for line in statistics.splitlines()).get("inactive_file", 0)
        return max(int(limit) - int(used) + int(cached), 1)
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return None
