"""Cost of a block: its time, memory and energy, with a pretended torch and NVML."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusion_bench_featcal.results import measure

MEBIBYTE = 2**20
WATT_HOUR = 3_600_000  # in millijoules


def test_a_block_is_timed_and_its_memory_seen() -> None:
    with measure() as result:
        block = np.ones(64 * MEBIBYTE, dtype=np.uint8)
        time.sleep(0.1)
        result.more["expert_bytes"] = 10
    assert block.sum() == 64 * MEBIBYTE
    assert isinstance(result.seconds, float) and result.seconds >= 0.1
    assert isinstance(result.peak_rss_bytes, int) and result.peak_rss_bytes > 64 * MEBIBYTE
    assert result.as_dict()["expert_bytes"] == 10


# Devices 0 and 2 are in use. Their counters before and after the block, and watt-hours.
@pytest.mark.parametrize(
    ("before", "after", "energy"),
    [
        ([WATT_HOUR, 5, 0], [3 * WATT_HOUR, 10**9, WATT_HOUR // 2], pytest.approx(2.5)),
        ([0, 0, 0], [0, 9, 0], None),  # counters that do not move
    ],
)
def test_memory_and_energy_of_the_devices_in_use_are_summed(
    before: list[int], after: list[int], energy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = list(before)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 3,
        memory_reserved=lambda device: 8 * (device != 1),
        get_device_properties=lambda device: SimpleNamespace(uuid=f"device-{device}"),
        synchronize=lambda device: None,
        reset_peak_memory_stats=lambda device: None,
        max_memory_allocated=lambda device: 5 + device,
    )
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda device: f"GPU-device-{device}",
        nvmlDeviceGetTotalEnergyConsumption=lambda device: counters[device],
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with measure() as result:
        counters[:] = after
    assert result.peak_accelerator_bytes == 5 + 7 and result.gpu_energy_wh == energy
