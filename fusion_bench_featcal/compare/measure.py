"""What a stretch of code costs: wall time, host memory, accelerator memory.

What cannot be measured is reported as "unavailable", never as 0.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .names import UNAVAILABLE

SAMPLING_SECONDS = 0.02


@dataclass
class Cost:
    """Filled when the `measure` block ends.

    Attributes:
        seconds: Wall time of the block.
        peak_rss_bytes: Largest resident set of this process during the block.
        peak_rss_method: How that was found: "kernel" (exact), "sampled" (short peaks are missed),
            "process lifetime" (an upper bound) or "unavailable".
        peak_accelerator_bytes: Peak of CUDA memory allocated through torch, summed over devices;
            "unavailable" where the block used none.
        more: Further entries of the caller, for example {"expert_bytes": 10}.
    """

    seconds: float | str = UNAVAILABLE
    peak_rss_bytes: int | str = UNAVAILABLE
    peak_rss_method: str = UNAVAILABLE
    peak_accelerator_bytes: int | str = UNAVAILABLE
    more: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the entries for `Report.cost`."""
        own = {key: value for key, value in vars(self).items() if key != "more"}
        return {**own, **self.more}


@contextmanager
def measure() -> Iterator[Cost]:
    """Measure the block that runs under it.

    Example:
        with measure() as cost:
            calibrate(...)
        report.add_row("featcal", accuracies, cost=cost.as_dict())

    Resets torch's CUDA peak statistics. The cost is filled even when the block raises.
    """
    cost = Cost()
    _start_accelerator_peak()
    lifetime_before = _lifetime_peak()
    sampler = _Sampler()
    sampler.start()
    start = time.perf_counter()
    try:
        yield cost
    finally:
        try:
            # Waits for the device, so it comes before the clock is read.
            cost.peak_accelerator_bytes = _accelerator_peak()
            cost.seconds = time.perf_counter() - start
        finally:
            sampled = sampler.stop()
            cost.peak_rss_bytes, cost.peak_rss_method = _host_peak(
                lifetime_before, _lifetime_peak(), sampled
            )


def _host_peak(before: int | None, after: int | None, sampled: int | None) -> tuple[int | str, str]:
    """Choose the best statement the three readings allow."""
    if before is not None and after is not None and after > before:
        # The process's record was set inside the block, so it is the block's own peak.
        return after, "kernel"
    if sampled is not None:
        return sampled, "sampled"
    if after is not None:
        return after, "process lifetime"
    return UNAVAILABLE, UNAVAILABLE


class _Sampler:
    """Reads this process's resident set from a thread; does nothing where psutil is missing."""

    def __init__(self) -> None:
        try:
            import psutil
        except ImportError:
            self._process = None
        else:
            self._process = psutil.Process()
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="rss-sampler", daemon=True)

    def start(self) -> None:
        if self._process is not None:
            self._thread.start()

    def stop(self) -> int | None:
        if self._process is None:
            return None
        self._done.set()
        self._thread.join()
        self._sample()
        return self._peak

    def _loop(self) -> None:
        while not self._done.is_set():
            self._sample()
            self._done.wait(SAMPLING_SECONDS)

    def _sample(self) -> None:
        if self._process is not None:
            self._peak = max(self._peak, self._process.memory_info().rss)


def _lifetime_peak() -> int | None:
    """Largest resident set of the process so far, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kibibytes, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def _cuda_devices() -> tuple[Any, list[int]]:
    """torch.cuda and the devices this process holds memory on.

    torch is not imported and no device is touched for the question: either would cost memory.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, []
    cuda = torch.cuda
    return cuda, [index for index in range(cuda.device_count()) if cuda.memory_reserved(index) > 0]


def _start_accelerator_peak() -> None:
    cuda, devices = _cuda_devices()
    for device in devices:
        cuda.synchronize(device)
        cuda.reset_peak_memory_stats(device)


def _accelerator_peak() -> int | str:
    cuda, devices = _cuda_devices()
    for device in devices:
        cuda.synchronize(device)
    return sum(cuda.max_memory_allocated(device) for device in devices) or UNAVAILABLE
