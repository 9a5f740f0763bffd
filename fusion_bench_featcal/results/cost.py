"""Cost of a stretch of code (time, memory, energy), and the machine and packages it ran with.

Values that cannot be measured are reported as "unavailable", never as 0.
"""

import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from .long_table import UNAVAILABLE

MEMORY_EVERY_SECONDS = 0.02
# Finding children reads the whole process table, and examining a large child is slow. Both are done
# at this interval, or at a longer one, so that they take at most a twentieth of the time.
CHILDREN_EVERY_SECONDS = 0.2
_CHILDREN_SHARE = 0.05
POWER_EVERY_SECONDS = 0.1
_JOULES_PER_WATT_HOUR = 3_600

# Model properties in a comparison, in addition to the costs measured here.
TOTAL_SECONDS = "seconds_with_merger"
TASK_ID = "task_id_at_inference"
MODULES_ADDED = "modules_added"
PARAMETERS_ADDED = "parameters_added"

PACKAGES = (
    "fusion-bench-featcal", "fusion-bench", "torch", "transformers", "lightning", "hydra-core",
    "datasets", "numpy",
)  # fmt: skip


@dataclass
class Cost:
    """Cost of a block, filled when its `measure` ends. Unmeasured values are "unavailable"."""

    seconds: float | str = UNAVAILABLE
    """Wall time."""
    peak_rss_bytes: int | str = UNAVAILABLE
    """Peak memory of this process and its children: the resident set of this process, and the
    unique memory of each child. Pages shared only among children do not count."""
    peak_rss_method: str = UNAVAILABLE
    """"kernel" (exact, from the kernel's record, without children) or "sampled" (short peaks are
    missed)."""
    peak_accelerator_bytes: int | str = UNAVAILABLE
    """Peak of CUDA memory allocated through torch, summed over devices."""
    gpu_energy_wh: float | str = UNAVAILABLE
    """Watt-hours of the GPUs in use, including idle power and other processes. Needs the library
    nvidia-ml-py (extra `energy`) and a reading of every device in use."""
    gpu_energy_method: str = UNAVAILABLE
    """"counter" (of the devices) or "sampled" (power of at least one, integrated over samples)."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further entries of the caller, for example {"expert_bytes": 10}."""

    def as_dict(self) -> dict[str, Any]:
        """Return the entries for `Report.cost`."""
        measured = {key: value for key, value in vars(self).items() if key != "more"}
        return measured | self.more


@contextmanager
def measure() -> Iterator[Cost]:
    """Measure the enclosed block. This resets torch's CUDA peak statistics.

    Example:
        with measure() as cost:
            calibrate(...)
        report.add_row("featcal", accuracies, cost=cost.as_dict())

    The cost is filled even if the block raises.
    """
    cost = Cost()
    cuda, devices = _cuda_devices()
    for device in devices:
        cuda.synchronize(device)
        cuda.reset_peak_memory_stats(device)
    with _host_memory(cost), _gpu_energy(cost):
        start = time.perf_counter()
        try:
            yield cost
        finally:
            cuda, devices = _cuda_devices()
            for device in devices:  # wait for running kernels before the clock is read
                cuda.synchronize(device)
            peak = sum(cuda.max_memory_allocated(device) for device in devices)
            cost.peak_accelerator_bytes = peak or UNAVAILABLE
            cost.seconds = time.perf_counter() - start


class _Sampler:
    """Calls `read` from a thread until it is stopped, and once more afterwards."""

    def __init__(self, read: Callable[[], None], seconds: float) -> None:
        self._read, self._seconds = read, seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        self._sample()

    def _loop(self) -> None:
        while not self._done.wait(self._seconds):
            self._sample()

    def _sample(self) -> None:
        # If memory runs out, the error of the measured work is reported.
        with contextlib.suppress(MemoryError, OSError):
            self._read()


def _cuda_devices() -> tuple[Any, list[int]]:
    """Return torch.cuda and the devices on which this process has memory.

    Neither imports torch nor touches a device, because both would cost memory.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, []
    cuda = torch.cuda
    return cuda, [index for index in range(cuda.device_count()) if cuda.memory_reserved(index) > 0]


# ---- host memory


@contextmanager
def _host_memory(cost: Cost) -> Iterator[None]:
    before, faults = _usage()
    tree = _ProcessTree()
    sampler = _Sampler(tree.read, MEMORY_EVERY_SECONDS)
    try:
        yield
    finally:
        sampler.stop()
        after, faults_after = _usage()
        # Children between two samples are detected by their page faults.
        children = tree.saw_children or faults_after != faults
        reading = best_reading(before, after, tree.peak, children)
        cost.peak_rss_bytes, cost.peak_rss_method = reading


def best_reading(before: int, after: int, sampled: int, had_children: bool) -> tuple[int, str]:
    """Return the most accurate peak memory of a block that the readings allow.

    Args:
        before: The kernel's record of this process before the block, in bytes, or 0 if unknown.
        after: The same after it.
        sampled: Largest sample of the process tree.
        had_children: Whether there were child processes during the block.

    Returns:
        Peak in bytes, and the method.
    """
    # If the record rose inside the block, it is the block's peak.
    record = after if after > before > 0 else 0
    if record and not had_children:
        return record, "kernel"
    return max(sampled, record), "sampled"


class _ProcessTree:
    """Largest memory of this process and its descendants over all readings."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._children = 0
        self._next_look = 0.0
        self.saw_children = False
        self.peak = 0
        self.read()

    def read(self) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._children = self._unique_to_children()
            took = time.monotonic() - now
            self._next_look = now + max(CHILDREN_EVERY_SECONDS, took / _CHILDREN_SHARE)
        self.peak = max(self.peak, self._process.memory_info().rss + self._children)

    def _unique_to_children(self) -> int:
        total = 0
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # the child has ended
                total += child.memory_full_info().uss
                self.saw_children = True
        return total


def _usage() -> tuple[int, int]:
    """Return this process's peak resident set in bytes, and page faults of ended children.

    Every child adds faults. Both are 0 on a system without such records.
    """
    try:
        import resource
    except ImportError:
        return 0, 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kibibytes, macOS bytes.
    peak = peak if sys.platform == "darwin" else peak * 1024
    return peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


# ---- energy, through NVML


@contextmanager
def _gpu_energy(cost: Cost) -> Iterator[None]:
    """Read all devices of NVML, because the devices used by torch are only known at the end."""
    nvml = _open_nvml()
    meters = _start_meters(nvml) if nvml else {}
    try:
        yield
    finally:
        read = {uuid: joules for uuid, meter in meters.items() if (joules := meter.stop())}
        cuda, devices = _cuda_devices()
        properties = [cuda.get_device_properties(device) for device in devices] if nvml else []
        used = [_bare(getattr(entry, "uuid", "")) for entry in properties]
        # A partial sum would look like the total.
        if used and all(uuid in read for uuid in used):
            cost.gpu_energy_wh = sum(read[uuid] for uuid in used) / _JOULES_PER_WATT_HOUR
            cost.gpu_energy_method = max(meters[uuid].method for uuid in used)
        if nvml:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


class _Meter:
    """Energy of one device, from its counter, or else from its power by the trapezoid rule."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._joules: float | None = 0.0
        try:
            self._start, self._sampler, self.method = self._counter(), None, "counter"
        except nvml.NVMLError:  # older devices have no counter
            self._last = (time.perf_counter(), self._watts())
            self._sampler, self.method = _Sampler(self._sample, POWER_EVERY_SECONDS), "sampled"

    def stop(self) -> float | None:
        """Return joules since the start, 0 if nothing was counted, or None if a reading failed."""
        if self._sampler is not None:
            self._sampler.stop()
            return self._joules
        try:
            # The counter moves in steps, so a shorter block was not measured.
            return max(self._counter() - self._start, 0.0)
        except self._nvml.NVMLError:
            return None

    def _counter(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000

    def _watts(self) -> float:
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000

    def _sample(self) -> None:
        try:
            now = (time.perf_counter(), self._watts())
        except self._nvml.NVMLError:
            self._joules = None
            return
        if self._joules is not None:
            self._joules += (now[0] - self._last[0]) * (now[1] + self._last[1]) / 2
            self._last = now


def _open_nvml() -> ModuleType | None:
    """Initialise the library. Return None if torch has no CUDA or NVML does not respond."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    with contextlib.suppress(ImportError):
        import pynvml  # pyright: ignore[reportMissingImports]

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            return pynvml
    return None


def _start_meters(nvml: ModuleType) -> dict[str, _Meter]:
    """Return a meter for every readable device, by the device's UUID."""
    meters: dict[str, _Meter] = {}
    with contextlib.suppress(nvml.NVMLError):
        for index in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                meters[_bare(nvml.nvmlDeviceGetUUID(handle))] = _Meter(nvml, handle)
    return meters


def _bare(uuid: Any) -> str:
    """Remove NVML's prefix `GPU-` from a UUID. Older releases return bytes."""
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


def describe_device(device: Any = "cpu") -> dict[str, Any]:
    """Describe the machine of a run.

    Args:
        device: The device in use, for example `fabric.device`, "cpu" or "cuda:0".

    Returns:
        `device`, `accelerator` (its marketing name, "none" on CPU), `cpu`, `cpu_cores` usable by
        this process, `torch_threads`, `platform`. Unknown values are "unavailable".
    """
    torch: Any = sys.modules.get("torch")
    name = str(device)
    accelerator = "none" if name.startswith("cpu") else UNAVAILABLE
    if torch is not None and name.startswith("cuda") and torch.cuda.is_available():
        accelerator = torch.cuda.get_device_name(device)
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "device": name,
        "accelerator": accelerator,
        "cpu": _cpu_model(),
        "cpu_cores": len(affinity(0)) if affinity else os.cpu_count() or UNAVAILABLE,
        "torch_threads": torch.get_num_threads() if torch is not None else UNAVAILABLE,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or UNAVAILABLE
