"""Cost of a stretch of code (time, memory, energy), and the machine and packages it ran with.

What cannot be measured is reported as "unavailable", never as 0.
"""

import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from .long_table import UNAVAILABLE

MEMORY_EVERY_SECONDS = 0.02
# Finding children reads the whole process table, and a large child takes long to examine: that is
# done as often as this, or less often, so that it takes a twentieth of the time.
CHILDREN_EVERY_SECONDS = 0.2
_CHILDREN_SHARE = 0.05
POWER_EVERY_SECONDS = 0.1
_MILLIJOULES_PER_WATT_HOUR = 3_600_000
_JOULES_PER_WATT_HOUR = 3_600

# What a comparison says about a model besides the costs that are measured here.
TASK_ID = "task_id_at_inference"
MODULES_ADDED = "modules_added"
PARAMETERS_ADDED = "parameters_added"
SECONDS_PER_SAMPLE = "inference_seconds_per_sample"

PACKAGES = (
    "fusion-bench-featcal", "fusion-bench", "torch", "transformers", "lightning", "hydra-core",
    "datasets", "numpy",
)  # fmt: skip


@dataclass
class Cost:
    """Filled when the `measure` block ends.

    Attributes:
        seconds: Wall time of the block.
        peak_rss_bytes: Largest memory of this process and its children during the block: the
            resident set of this process, and of each child what it shares with no other process.
            Pages that a forked data loader worker shares with this process count once; pages that
            children share with each other alone do not count.
        peak_rss_method: "kernel" (exact, from the kernel's own record; there were no children),
            "sampled" (short peaks are missed), "process lifetime" (an upper bound for this process
            without children) or "unavailable".
        peak_accelerator_bytes: Peak of CUDA memory allocated through torch, summed over devices;
            "unavailable" where the block used none.
        gpu_energy_wh: Watt-hours that the GPUs in use drew during the block, as a whole, with what
            they draw idle and for others; "unavailable" without torch's CUDA, without the library
            nvidia-ml-py (extra `energy`), or where a device in use cannot be read.
        gpu_energy_method: "counter" (of the devices), "sampled" (power, integrated over samples, of
            at least one device) or "unavailable".
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
        measured = {key: value for key, value in vars(self).items() if key != "more"}
        return measured | self.more


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
    with _host_memory(cost), _gpu_energy(cost):
        start = time.perf_counter()
        try:
            yield cost
        finally:
            # Waits for the device, so it comes before the clock is read.
            cost.peak_accelerator_bytes = _accelerator_peak()
            cost.seconds = time.perf_counter() - start


class _Sampler:
    """Calls `read` from a thread until it is stopped, and once more then."""

    def __init__(self, read: Callable[[], None], seconds: float) -> None:
        self._read, self._seconds = read, seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        self._read()

    def _loop(self) -> None:
        while not self._done.wait(self._seconds):
            self._read()


# ---- accelerator memory


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


# ---- host memory


@contextmanager
def _host_memory(cost: Cost) -> Iterator[None]:
    before, faults = _usage()
    tree = _process_tree()
    sampler = _Sampler(tree.read, MEMORY_EVERY_SECONDS) if tree else None
    try:
        yield
    finally:
        if sampler:
            sampler.stop()
        after, faults_after = _usage()
        # Children that lived between two samples are seen by their page faults.
        children = bool(tree and tree.saw_children) or faults_after != faults
        reading = best_reading(before, after, tree.peak if tree else None, children)
        cost.peak_rss_bytes, cost.peak_rss_method = reading


def best_reading(
    before: int | None, after: int | None, sampled: int | None, had_children: bool
) -> tuple[int | str, str]:
    """Choose the best statement that the readings allow.

    Args:
        before: This process's record of the kernel before the block, in bytes; None: not known.
        after: The same after it.
        sampled: Largest sample of the process tree; None: not sampled.
        had_children: Whether there were child processes meanwhile.

    Returns:
        Peak in bytes, or "unavailable", and the method.
    """
    # A record that was set inside the block is the block's own peak.
    record = after if before is not None and after is not None and after > before else None
    if record is not None and not had_children:
        return record, "kernel"
    if sampled is not None:
        return max(sampled, record or 0), "sampled"
    if after is not None:
        return after, "process lifetime"
    return UNAVAILABLE, UNAVAILABLE


class _ProcessTree:
    """Largest memory of this process and its descendants over all readings."""

    def __init__(self, psutil: ModuleType) -> None:
        self._psutil = psutil
        self._process: Any = psutil.Process()
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
            with contextlib.suppress(self._psutil.Error):  # it has ended meanwhile
                total += child.memory_full_info().uss
                self.saw_children = True
        return total


def _process_tree() -> _ProcessTree | None:
    try:
        import psutil
    except ImportError:
        return None
    return _ProcessTree(psutil)


def _usage() -> tuple[int | None, int | None]:
    """Largest resident set of this process so far, in bytes, and page faults of ended children.

    Every child adds faults. None where the system is silent.
    """
    try:
        import resource
    except ImportError:
        return None, None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kibibytes, macOS bytes.
    peak = peak if sys.platform == "darwin" else peak * 1024
    return peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


# ---- energy, through NVML


@contextmanager
def _gpu_energy(cost: Cost) -> Iterator[None]:
    """All devices that NVML shows are read: which of them torch uses is known only at the end."""
    nvml = _open_nvml()
    meters = _start_meters(nvml) if nvml else {}
    try:
        yield
    finally:
        if nvml:
            read = {uuid: meter.stop() for uuid, meter in meters.items()}
            cost.gpu_energy_wh, cost.gpu_energy_method = _sum_over_used(read, meters)
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


class _CounterMeter:
    """A device's own counter of millijoules since the driver was loaded."""

    method = "counter"

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._start = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)

    def stop(self) -> float | None:
        """Watt-hours since the start; None where they cannot be read or nothing was counted."""
        try:
            now = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._nvml.NVMLError:
            return None
        # The counter moves in steps: a block shorter than one was not measured.
        return (now - self._start) / _MILLIJOULES_PER_WATT_HOUR if now > self._start else None


class _PowerMeter:
    """Samples a device's power and integrates it by the trapezoid rule."""

    method = "sampled"

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._joules = 0.0
        self._last = (time.perf_counter(), self._watts())
        self._failed = False
        self._sampler = _Sampler(self._sample, POWER_EVERY_SECONDS)

    def stop(self) -> float | None:
        """Watt-hours since the start; None where a reading failed."""
        self._sampler.stop()
        return None if self._failed or not self._joules else self._joules / _JOULES_PER_WATT_HOUR

    def _sample(self) -> None:
        try:
            now = (time.perf_counter(), self._watts())
        except self._nvml.NVMLError:
            self._failed = True
            return
        self._joules += (now[0] - self._last[0]) * (now[1] + self._last[1]) / 2
        self._last = now

    def _watts(self) -> float:
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000


_Meters = Mapping[str, _CounterMeter | _PowerMeter]


def _open_nvml() -> ModuleType | None:
    """Initialise the library; None where torch has no CUDA or NVML does not answer."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _start_meters(nvml: ModuleType) -> _Meters:
    """A meter for every device that can be read, by the device's UUID."""
    meters: dict[str, _CounterMeter | _PowerMeter] = {}
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:
        return meters
    for index in range(count):
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _bare(nvml.nvmlDeviceGetUUID(handle))
            try:
                meters[uuid] = _CounterMeter(nvml, handle)
            except nvml.NVMLError:  # older devices have no counter
                meters[uuid] = _PowerMeter(nvml, handle)
    return meters


def _sum_over_used(read: Mapping[str, float | None], meters: _Meters) -> tuple[float | str, str]:
    cuda, devices = _cuda_devices()
    properties = [cuda.get_device_properties(device) for device in devices]
    used = [_bare(getattr(entry, "uuid", "")) for entry in properties]
    values = [value for uuid in used if (value := read.get(uuid)) is not None]
    # A part of the sum would look like the whole.
    if not values or len(values) < len(used):
        return UNAVAILABLE, UNAVAILABLE
    return sum(values), max(meters[uuid].method for uuid in used)


def _bare(uuid: Any) -> str:
    """NVML writes `GPU-` before what torch calls the UUID; older releases give bytes."""
    text = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    return text.removeprefix("GPU-")


# ---- packages and machine


def versions() -> dict[str, str]:
    """Return Python's version and those of the packages that decide numbers."""
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            numbers[package] = "not installed"
    return numbers


def describe_device(device: Any = "cpu") -> dict[str, Any]:
    """Describe the machine a run computed on.

    Args:
        device: The device in use, for example `fabric.device`, "cpu" or "cuda:0".

    Returns:
        `device`, `accelerator` (its marketing name, "none" on CPU), `cpu`, `cpu_cores` usable by
        this process, `torch_threads`, `platform`; "unavailable" for what cannot be found out.
    """
    torch = sys.modules.get("torch")
    name = str(device)
    accelerator = "none"
    if not name.startswith("cpu"):
        cuda = torch is not None and name.startswith("cuda") and torch.cuda.is_available()
        accelerator = torch.cuda.get_device_name(device) if torch and cuda else UNAVAILABLE
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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or UNAVAILABLE
