"""Cost of a block (time, memory, energy) and what it ran with, with a pretended torch and NVML."""

import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusion_bench_featcal.results import UNAVAILABLE, cost, describe_device, measure, versions

MEBIBYTE = 2**20
WATT_HOUR = 3_600_000  # in millijoules


def test_a_block_is_timed_and_its_memory_seen():
    with measure() as made:
        block = np.ones(64 * MEBIBYTE, dtype=np.uint8)
        time.sleep(0.1)
        made.more["expert_bytes"] = 10
    assert block.sum() == 64 * MEBIBYTE
    assert isinstance(made.seconds, float) and made.seconds >= 0.1
    assert isinstance(made.peak_rss_bytes, int) and made.peak_rss_bytes > 64 * MEBIBYTE
    assert made.peak_rss_method in ("kernel", "sampled")
    assert set(made.as_dict()) == {
        "seconds", "peak_rss_bytes", "peak_rss_method", "peak_accelerator_bytes", "gpu_energy_wh",
        "gpu_energy_method", "expert_bytes",
    }  # fmt: skip


def test_cost_is_filled_when_the_block_raises():
    with pytest.raises(ZeroDivisionError), measure() as made:
        _ = 1 / 0
    assert isinstance(made.seconds, float)


def pretend_cuda(
    monkeypatch: pytest.MonkeyPatch, reserved: Sequence[int], *, initialised: bool = True
) -> list[tuple[str, int]]:
    """torch holds memory on some devices, which it numbers as NVML does; returns its calls."""
    calls: list[tuple[str, int]] = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialised,
        device_count=lambda: len(reserved),
        memory_reserved=lambda device: reserved[device],
        get_device_properties=lambda device: SimpleNamespace(uuid=f"device-{device}"),
        synchronize=lambda device: calls.append(("synchronize", device)),
        reset_peak_memory_stats=lambda device: calls.append(("reset", device)),
        max_memory_allocated=lambda device: 5 + device,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return calls


def test_peaks_of_the_devices_in_use_are_summed_and_idle_ones_left_alone(monkeypatch):
    calls = pretend_cuda(monkeypatch, [8, 0, 8])
    with measure() as made:
        calls.append(("block", -1))
    assert made.peak_accelerator_bytes == 5 + 7
    assert ("reset", 0) in calls[: calls.index(("block", -1))]
    assert calls[-2:] == [("synchronize", 0), ("synchronize", 2)]
    assert all(device != 1 for _, device in calls)


@pytest.mark.parametrize("torch_is_there", [True, False])
def test_no_accelerator_is_unavailable_not_zero(monkeypatch, torch_is_there: bool):
    pretend_cuda(monkeypatch, [8], initialised=False)
    if not torch_is_there:
        monkeypatch.setitem(sys.modules, "torch", None)
    with measure() as made:
        pass
    assert made.peak_accelerator_bytes == UNAVAILABLE


# Says when its memory is filled, and goes when its input ends.
CHILD = f"block = bytearray(b'x') * {96 * MEBIBYTE}; print('filled', flush=True); input()"


def run_child(wait: Callable[[], object]) -> None:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "filled\n"
    wait()
    child.communicate("\n")


def test_memory_of_a_child_counts(monkeypatch):
    measured, read = Event(), cost._ProcessTree.read

    with measure() as without:
        pass
    assert isinstance(without.peak_rss_bytes, int)
    filled = without.peak_rss_bytes + 96 * MEBIBYTE

    def watched_read(tree: Any) -> None:
        read(tree)
        if tree.peak > filled:
            measured.set()

    monkeypatch.setattr(cost._ProcessTree, "read", watched_read)
    with measure() as made:  # on a busy machine samples are far apart
        run_child(partial(measured.wait, 60))
    assert isinstance(made.peak_rss_bytes, int) and made.peak_rss_bytes > filled
    assert made.peak_rss_method == "sampled"


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """Devices by index: each has a counter of millijoules, or only a power."""

    NVMLError = NVMLError

    def __init__(
        self, counters: Sequence[int | None], watts: float = 0.0, driver: bool = True
    ) -> None:
        super().__init__("pynvml")
        self.counters, self.watts = counters, watts
        self.driver, self.fails_from_now, self.opened = driver, False, 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("driver not loaded")
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


def pretend(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None, in_use: list[int]) -> None:
    pretend_cuda(monkeypatch, [int(device in in_use) for device in range(3)])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_counters_of_the_devices_in_use_are_summed(monkeypatch: pytest.MonkeyPatch):
    nvml = FakeNvml([WATT_HOUR, 5, 0])
    pretend(monkeypatch, nvml, in_use=[0, 2])
    with measure() as made:
        nvml.counters = [3 * WATT_HOUR, 10**9, WATT_HOUR // 2]
    assert made.gpu_energy_wh == pytest.approx(2.5)
    assert made.gpu_energy_method == "counter"
    assert nvml.opened == 0


def fail_later(nvml: FakeNvml) -> None:
    nvml.fails_from_now = True


def count(nvml: FakeNvml) -> None:
    nvml.counters = [None if value is None else value + 1 for value in nvml.counters]


@pytest.mark.parametrize(
    ("nvml", "in_use", "meanwhile"),
    [
        (None, [0], None),  # no library
        (FakeNvml([0], driver=False), [0], None),
        (FakeNvml([0]), [], count),  # no device in use
        (FakeNvml([0]), [0], None),  # the counter did not move
        (FakeNvml([0]), [0], fail_later),
        (FakeNvml([None], watts=9.0), [0], fail_later),
        (FakeNvml([0, None]), [0, 1], count),  # one of two can be read: no part of the sum
        (FakeNvml([0]), [2], count),  # torch uses what NVML does not show
    ],
)
def test_energy_that_cannot_be_measured_is_unavailable(
    monkeypatch, nvml: Any, in_use: list[int], meanwhile: Callable[[Any], None] | None
):
    pretend(monkeypatch, nvml, in_use)
    with measure() as made:
        if meanwhile is not None:
            meanwhile(nvml)
    assert made.gpu_energy_wh == made.gpu_energy_method == UNAVAILABLE


def test_versions_are_those_installed_of_what_decides_numbers() -> None:
    named = {"python", "torch", "transformers", "fusion-bench", "lightning", "fusion-bench-featcal"}
    found = versions()
    assert named <= set(found)
    assert (found["python"], found["torch"]) == (platform.python_version(), version("torch"))


def test_the_device_is_described(monkeypatch: pytest.MonkeyPatch):
    made = describe_device("cpu")
    assert (made["device"], made["accelerator"]) == ("cpu", "none")
    assert made["cpu"] and made["cpu_cores"] >= 1
    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda device: "Abacus 9")
    torch = SimpleNamespace(cuda=cuda, get_num_threads=lambda: 3)
    monkeypatch.setitem(sys.modules, "torch", torch)
    made = describe_device("cuda:1")
    assert (made["accelerator"], made["torch_threads"]) == ("Abacus 9", 3)
    monkeypatch.setitem(sys.modules, "torch", None)
    made = describe_device("mps")
    assert made["accelerator"] == made["torch_threads"] == UNAVAILABLE
