"""Energy by a pretended NVML: what its counters and powers make, and what cannot be told."""

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fusion_bench_featcal.compare import UNAVAILABLE, gpu_energy, measure
from fusion_bench_featcal.compare.gpu_energy import GpuEnergy

WATT_HOUR = 3_600_000  # in millijoules


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """Devices by index: a counter that jumps when `run` is called, or only a power."""

    NVMLError = NVMLError

    def __init__(self, counters: Sequence[int | None], watts: float = 0.0) -> None:
        super().__init__("pynvml")
        self.counters, self.watts = counters, watts
        self.fails_from_now = False
        self.opened = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.counters)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-device-{handle}"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        value = self.counters[handle]
        if self.fails_from_now or value is None:
            raise NVMLError("not supported")
        return value

    def nvmlDeviceGetPowerUsage(self, handle: int) -> float:
        if self.fails_from_now or self.watts <= 0:
            raise NVMLError("not supported")
        return 1000 * self.watts


def pretend(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None, in_use: list[int], visible: int = 3
) -> None:
    """torch holds memory on some devices, which it numbers as NVML does."""
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: visible,
        memory_reserved=lambda device: int(device in in_use),
        get_device_properties=lambda device: SimpleNamespace(uuid=f"device-{device}"),
        synchronize=lambda device: None,
        reset_peak_memory_stats=lambda device: None,
        max_memory_allocated=lambda device: 1,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_counters_of_the_devices_in_use_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([WATT_HOUR, 5, 0])
    pretend(monkeypatch, nvml, in_use=[0, 2])
    with measure() as cost:
        nvml.counters = [3 * WATT_HOUR, 10**9, WATT_HOUR // 2]
    assert cost.gpu_energy_wh == pytest.approx(2.5)
    assert cost.gpu_energy_method == "counter"
    assert nvml.opened == 0


def test_power_is_integrated_where_there_is_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 W for 18 s, then a rise to 300 W within 18 s: 0.5 Wh and 1 Wh."""
    nvml = FakeNvml([None], watts=100.0)
    pretend(monkeypatch, nvml, in_use=[0], visible=1)
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=0.0)
    monkeypatch.setattr(gpu_energy, "time", clock)
    monkeypatch.setattr(gpu_energy, "SAMPLING_SECONDS", 1e6)  # samples are taken by hand
    energy = GpuEnergy()
    with energy:
        (meter,) = energy._meters.values()
        clock.now = 18.0
        meter._sample()  # type: ignore[union-attr]
        clock.now, nvml.watts = 36.0, 300.0
    assert energy.watt_hours == pytest.approx(1.5)
    assert energy.method == "sampled"


def test_power_is_sampled_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([None], watts=100.0)
    pretend(monkeypatch, nvml, in_use=[0], visible=1)
    with measure() as cost:
        sum(range(100_000))
    assert isinstance(cost.seconds, float) and isinstance(cost.gpu_energy_wh, float)
    assert cost.gpu_energy_wh >= 100 * cost.seconds / 3600


def fail_later(nvml: FakeNvml) -> None:
    nvml.fails_from_now = True


def count(nvml: FakeNvml) -> None:
    nvml.counters = [None if value is None else value + 1 for value in nvml.counters]


@pytest.mark.parametrize(
    ("nvml", "in_use", "meanwhile"),
    [
        (None, [0], None),  # no library
        (FakeNvml([0]), [], count),  # no device in use
        (FakeNvml([0]), [0], None),  # the counter did not move
        (FakeNvml([0]), [0], fail_later),
        (FakeNvml([None], watts=9.0), [0], fail_later),
        (FakeNvml([0, None]), [0, 1], count),  # one of two can be read: no part of the sum
        (FakeNvml([0]), [2], count),  # torch uses what NVML does not show
    ],
)
def test_what_cannot_be_measured_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None, in_use: list[int], meanwhile: Any
) -> None:
    pretend(monkeypatch, nvml, in_use)
    with measure() as cost:
        if meanwhile is not None:
            meanwhile(nvml)
    assert cost.gpu_energy_wh == cost.gpu_energy_method == UNAVAILABLE


def test_without_a_driver_energy_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([0])

    def fail() -> None:
        raise NVMLError("driver not loaded")

    nvml.nvmlInit = fail  # type: ignore[method-assign]
    pretend(monkeypatch, nvml, in_use=[0])
    with measure() as cost:
        pass
    assert cost.gpu_energy_wh == UNAVAILABLE
