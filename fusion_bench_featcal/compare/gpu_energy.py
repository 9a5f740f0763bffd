"""Energy that the GPUs of this process draw while something runs, through NVML."""

import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from types import ModuleType, TracebackType
from typing import Any

from .names import UNAVAILABLE

SAMPLING_SECONDS = 0.1
_MILLIJOULES_PER_WATT_HOUR = 3_600_000
_JOULES_PER_WATT_HOUR = 3_600


class GpuEnergy:
    """Measures energy between `with` and its end.

    All devices that NVML shows are read, because which of them torch will use is known only when
    the block has ended; those that it holds memory on then count. A device counts as a whole, with
    what it draws idle and for others.

    Attributes:
        watt_hours: Sum over the devices in use; "unavailable" without torch's CUDA, without the
            library nvidia-ml-py (extra `energy`), or where a device in use cannot be read.
        method: "counter": difference of the devices' own energy counters; "sampled": power,
            integrated over samples (of at least one device); or "unavailable".
    """

    def __init__(self) -> None:
        """Prepare; no device is touched."""
        self.watt_hours: float | str = UNAVAILABLE
        self.method = UNAVAILABLE
        self._nvml: ModuleType | None = None
        self._meters: dict[str, _CounterMeter | _PowerMeter] = {}

    def __enter__(self) -> "GpuEnergy":
        self._nvml = _open_nvml()
        if self._nvml is not None:
            self._meters = _start_meters(self._nvml)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._nvml is None:
            return
        read = {uuid: meter.stop() for uuid, meter in self._meters.items()}
        self.watt_hours, self.method = _sum_over_used(read, self._meters)
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def _sum_over_used(
    read: Mapping[str, float | None], meters: Mapping[str, "_CounterMeter | _PowerMeter"]
) -> tuple[float | str, str]:
    used = _uuids_in_use()
    values = [read.get(uuid) for uuid in used]
    # A part of the sum would look like the whole.
    if not values or any(value is None for value in values):
        return UNAVAILABLE, UNAVAILABLE
    sampled = any(isinstance(meters[uuid], _PowerMeter) for uuid in used)
    return sum(value or 0.0 for value in values), "sampled" if sampled else "counter"


class _CounterMeter:
    """The device's own counter of millijoules since the driver was loaded."""

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
    """Samples a device's power from a thread and integrates it by the trapezoid rule."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._joules = 0.0
        self._last = (time.perf_counter(), self._watts())
        self._failed = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="power-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> float | None:
        """Watt-hours since the start; None where a reading failed."""
        self._done.set()
        self._thread.join()
        self._sample()
        return None if self._failed or not self._joules else self._joules / _JOULES_PER_WATT_HOUR

    def _loop(self) -> None:
        while not self._done.wait(SAMPLING_SECONDS):
            self._sample()

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


def _open_nvml() -> ModuleType | None:
    """The library, initialised; None where torch has no CUDA or NVML does not answer."""
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


def _start_meters(nvml: ModuleType) -> dict[str, _CounterMeter | _PowerMeter]:
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


def _uuids_in_use() -> list[str]:
    """UUIDs of the devices that this process holds memory on."""
    cuda, devices = cuda_devices()
    properties = [cuda.get_device_properties(device) for device in devices]
    return [_bare(getattr(entry, "uuid", "")) for entry in properties]


def _bare(uuid: Any) -> str:
    """NVML writes `GPU-` before what torch calls the UUID; older releases give bytes."""
    text = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    return text.removeprefix("GPU-")


def cuda_devices() -> tuple[Any, list[int]]:
    """torch.cuda and the devices this process holds memory on.

    torch is not imported and no device is touched for the question: either would cost memory.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, []
    cuda = torch.cuda
    return cuda, [index for index in range(cuda.device_count()) if cuda.memory_reserved(index) > 0]
