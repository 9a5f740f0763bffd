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
    with pytest.raises(ZeroDivisionError), measure() as result:
        _ = 1 / 0
    assert isinstance(result.seconds, float)


def nvml_of(counters: list[int | None]) -> Any:
    """A library with a counter of millijoules for each device. None: it cannot be read."""

    def energy(device: int) -> int:
        if (value := counters[device]) is None:
            raise OSError("not supported")
        return value

    return SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(counters),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda device: f"GPU-device-{device}",
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )


# Devices 0 and 2 are in use. Counters before and after the block, and watt hours, if measured:
# no library, a counter that does not move, and one of two devices that cannot be read.
@pytest.mark.parametrize(
    ("before", "after", "energy"),
    [
        ([WATT_HOUR, 5, 0], [3 * WATT_HOUR, 10**9, WATT_HOUR // 2], 2.5),
        (None, None, None),
        ([0, 0, 0], [0, 9, 0], None),
        ([0, 0, None], [9, 9, None], None),
    ],
)
def test_memory_and_energy_of_the_devices_in_use_are_summed(
    before: Any, after: Any, energy: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 3,
        memory_reserved=lambda device: 8 * (device != 1),
        get_device_properties=lambda device: SimpleNamespace(uuid=f"device-{device}"),
        synchronize=lambda device: calls.append(("synchronize", device)),
        reset_peak_memory_stats=lambda device: calls.append(("reset", device)),
        max_memory_allocated=lambda device: 5 + device,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "pynvml", before and nvml_of(before))
    with measure() as result:
        calls.append(("block", -1))
        if before:
            before[:] = after
    assert result.peak_accelerator_bytes == 5 + 7
    assert ("reset", 0) in calls[: calls.index(("block", -1))]
    assert calls[-2:] == [("synchronize", 0), ("synchronize", 2)]
    assert all(device != 1 for _, device in calls)  # idle
    assert result.gpu_energy_wh == (None if energy is None else pytest.approx(energy))
    assert ("gpu_energy_wh" in result.as_dict()) == (energy is not None)
