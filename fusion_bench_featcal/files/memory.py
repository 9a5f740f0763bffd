"""Memory that is still free."""

from pathlib import Path

import psutil
import torch

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
