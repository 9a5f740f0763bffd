"""Peak memory of this process, read without torch."""

import contextlib
import sys
from pathlib import Path


def peak_memory() -> int | None:
    """Return the peak resident memory in bytes, or None where it is unknown.

    On Linux it counts from the kernel's last reset (`/proc/self/clear_refs`), on macOS from the
    start of the process.
    """
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
