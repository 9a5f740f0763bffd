"""What a stretch of code costs: wall time, host memory, accelerator memory, energy.

What cannot be measured is reported as "unavailable", never as 0.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .gpu_energy import GpuEnergy, cuda_devices
from .host_memory import HostMemory
from .names import UNAVAILABLE


@dataclass
class Cost:
    """Filled when the `measure` block ends.

    Attributes:
        seconds: Wall time of the block.
        peak_rss_bytes: Largest memory of this process and its children during the block; see
            `HostMemory` for what counts.
        peak_rss_method: How that was found: "kernel" (exact), "sampled" (short peaks are missed),
            "process lifetime" (an upper bound) or "unavailable".
        peak_accelerator_bytes: Peak of CUDA memory allocated through torch, summed over devices;
            "unavailable" where the block used none.
        gpu_energy_wh: Watt-hours that the GPUs in use drew during the block, see `GpuEnergy`;
            "unavailable" where there are none or they do not tell.
        gpu_energy_method: "counter" (of the device), "sampled" or "unavailable".
        more: Further entries of the caller, for example {"expert_bytes": 10}.
    """

    seconds: float | str = UNAVAILABLE
    peak_rss_bytes: int | str = UNAVAILABLE
    peak_rss_method: str = UNAVAILABLE
    peak_accelerator_bytes: int | str = UNAVAILABLE
    gpu_energy_wh: float | str = UNAVAILABLE
    gpu_energy_method: str = UNAVAILABLE
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
    cost, memory, energy = Cost(), HostMemory(), GpuEnergy()
    _start_accelerator_peak()
    try:
        with memory, energy:
            start = time.perf_counter()
            try:
                yield cost
            finally:
                # Waits for the device, so it comes before the clock is read.
                cost.peak_accelerator_bytes = _accelerator_peak()
                cost.seconds = time.perf_counter() - start
    finally:
        cost.peak_rss_bytes, cost.peak_rss_method = memory.peak, memory.method
        cost.gpu_energy_wh, cost.gpu_energy_method = energy.watt_hours, energy.method


def _start_accelerator_peak() -> None:
    cuda, devices = cuda_devices()
    for device in devices:
        cuda.synchronize(device)
        cuda.reset_peak_memory_stats(device)


def _accelerator_peak() -> int | str:
    cuda, devices = cuda_devices()
    for device in devices:
        cuda.synchronize(device)
    return sum(cuda.max_memory_allocated(device) for device in devices) or UNAVAILABLE
