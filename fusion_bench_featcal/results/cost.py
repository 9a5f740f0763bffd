"""Time, memory and energy of a block of code, and the machine and packages that it ran with.

Costs that cannot be measured are missing, never 0.
"""

import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fusion_bench_featcal.run.memory import peak_memory

_JOULES_PER_WATT_HOUR = 3_600
PACKAGES = (
    "fusion-bench-featcal", "fusion-bench", "torch", "transformers", "lightning", "hydra-core",
    "datasets", "numpy",
)  # fmt: skip


@dataclass
class Cost:
    """Cost of a block of code, filled when its `measure` ends. None stands for unmeasured costs."""

    seconds: float | None = None
    """Wall time."""
    peak_rss_bytes: int | None = None
    """Peak resident memory of this process."""
    peak_accelerator_bytes: int | None = None
    """Peak of CUDA memory allocated through torch, summed over devices."""
    gpu_energy_wh: float | None = None
    """Watt-hours by the counters of the GPUs in use, including idle power and other processes.
    Needs the library nvidia-ml-py (extra `energy`) and a counter on every device in use."""
    more: dict[str, float] = field(default_factory=dict)
    """Further entries of the caller, for example {"expert_bytes": 10}."""

    def as_dict(self) -> dict[str, float]:
        """Return the measured costs, for `Row.cost`."""
        measured = {key: value for key, value in vars(self).items() if key != "more"} | self.more
        return {key: value for key, value in measured.items() if value is not None}


@contextmanager
def measure() -> Iterator[Cost]:
    """Measure the enclosed block. This resets torch's CUDA peak statistics.

    Example:
        with measure() as cost:
            calibrate(...)
        run.add_row("featcal", scores, cost=cost.as_dict())

    The cost is filled even if the block raises.
    """
    cost = Cost()
    cuda, devices = _cuda_devices()
    for device in devices:
        cuda.synchronize(device)
        cuda.reset_peak_memory_stats(device)
    joules = _joules()
    with contextlib.suppress(OSError):  # on Linux, the kernel's record of the peak begins again
        Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    try:
        yield cost
    finally:
        cuda, devices = _cuda_devices()
        for device in devices:  # wait for running kernels before the clock is read
            cuda.synchronize(device)
        cost.seconds = time.perf_counter() - start
        cost.peak_rss_bytes = peak_memory()
        peak = sum(cuda.max_memory_allocated(device) for device in devices)
        cost.peak_accelerator_bytes = peak or None
        cost.gpu_energy_wh = _energy(joules, _joules(), cuda, devices)


def _cuda_devices() -> tuple[Any, list[int]]:
    """Return torch.cuda and the devices on which this process has memory.

    Neither imports torch nor touches a device, because both would cost memory.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, []
    cuda = torch.cuda
    return cuda, [index for index in range(cuda.device_count()) if cuda.memory_reserved(index) > 0]


def _joules() -> dict[str, float]:
    """Return the energy counters of all readable devices by their UUID, none without NVML."""
    torch, joules = sys.modules.get("torch"), dict[str, float]()
    if torch is None or not torch.cuda.is_available():
        return joules
    with contextlib.suppress(ImportError):
        import pynvml as nvml  # pyright: ignore[reportMissingImports]

        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            for index in range(nvml.nvmlDeviceGetCount()):
                with contextlib.suppress(nvml.NVMLError):  # older devices have no counter
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                    millijoules = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
                    joules[_uuid_text(nvml.nvmlDeviceGetUUID(handle))] = millijoules / 1000
            nvml.nvmlShutdown()
    return joules


def _energy(
    before: dict[str, float], after: dict[str, float], cuda: Any, devices: list[int]
) -> float | None:
    """Return the watt-hours of the devices in use, or None if one of them was not measured."""
    used = [_uuid_text(getattr(cuda.get_device_properties(n), "uuid", "")) for n in devices]
    joules = [after[uuid] - before[uuid] for uuid in used if uuid in before and uuid in after]
    # The counter moves in steps, so a shorter block was not measured. A partial sum would look
    # like the total.
    is_whole = bool(used) and len(joules) == len(used) and all(part > 0 for part in joules)
    return sum(joules) / _JOULES_PER_WATT_HOUR if is_whole else None


def _uuid_text(uuid: object) -> str:
    """Return a UUID without NVML's prefix `GPU-`. Older releases of NVML return bytes."""
    text = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    return text.removeprefix("GPU-")


# ---- packages and machine


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    numbers = dict.fromkeys(PACKAGES, "not installed")
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            numbers[package] = version(package)
    return {"python": platform.python_version(), **numbers}


def describe_device(device: object = "cpu") -> dict[str, Any]:
    """Describe the machine of a run.

    Args:
        device: The device in use, for example `fabric.device`, "cpu" or "cuda:0".

    Returns:
        `device`, `accelerator` (its marketing name, on a GPU), `cpu`, `cpu_cores` usable by this
        process, `torch_threads`, `platform`. Unknown entries are missing.
    """
    torch = sys.modules.get("torch")
    name, affinity = str(device), getattr(os, "sched_getaffinity", None)
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        pairs = (s.partition(":") for s in Path("/proc/cpuinfo").read_text().splitlines())
        cpu = next((value.strip() for key, _, value in pairs if key.strip() == "model name"), cpu)
    description = {
        "device": name,
        "cpu": cpu,
        "cpu_cores": len(affinity(0)) if affinity else os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if torch is not None:
        description["torch_threads"] = torch.get_num_threads()
        if name.startswith("cuda") and torch.cuda.is_available():
            description["accelerator"] = torch.cuda.get_device_name(device)
    return {key: value for key, value in description.items() if value}
