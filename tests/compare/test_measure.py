import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from fusion_bench_featcal.compare import UNAVAILABLE, measure

MEBIBYTE = 2**20


def test_a_block_is_timed_and_its_memory_seen():
    with measure() as cost:
        block = np.ones(64 * MEBIBYTE, dtype=np.uint8)
        time.sleep(0.1)
    assert block.sum() == 64 * MEBIBYTE
    assert isinstance(cost.seconds, float) and cost.seconds >= 0.1
    assert isinstance(cost.peak_rss_bytes, int)
    assert cost.peak_rss_bytes > 64 * MEBIBYTE
    assert cost.peak_rss_method in ("kernel", "sampled")


def test_cost_is_filled_when_the_block_raises():
    with pytest.raises(ZeroDivisionError), measure() as cost:
        _ = 1 / 0
    assert isinstance(cost.seconds, float)


def test_entries_of_the_caller_stand_beside_the_measured_ones():
    with measure() as cost:
        cost.more["expert_bytes"] = 10
    entries = cost.as_dict()
    assert entries["expert_bytes"] == 10
    assert set(entries) == {
        "seconds",
        "peak_rss_bytes",
        "peak_rss_method",
        "peak_accelerator_bytes",
        "gpu_energy_wh",
        "gpu_energy_method",
        "expert_bytes",
    }


def test_without_psutil_and_resource_memory_is_unavailable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setitem(sys.modules, "resource", None)
    with measure() as cost:
        pass
    assert cost.peak_rss_bytes == cost.peak_rss_method == UNAVAILABLE


def fake_cuda(reserved: list[int], peaks: list[int], initialised: bool = True):
    calls: list[tuple[str, int]] = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialised,
        device_count=lambda: len(reserved),
        memory_reserved=lambda device: reserved[device],
        synchronize=lambda device: calls.append(("synchronize", device)),
        reset_peak_memory_stats=lambda device: calls.append(("reset", device)),
        max_memory_allocated=lambda device: peaks[device],
    )
    return SimpleNamespace(cuda=cuda), calls


def test_peaks_of_the_devices_in_use_are_summed_and_idle_ones_left_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    torch, calls = fake_cuda(reserved=[8, 0, 8], peaks=[5, 99, 7])
    monkeypatch.setitem(sys.modules, "torch", torch)
    with measure() as cost:
        calls.append(("block", -1))
    assert cost.peak_accelerator_bytes == 12
    assert ("reset", 0) in calls[: calls.index(("block", -1))]
    assert calls[-2:] == [("synchronize", 0), ("synchronize", 2)]
    assert all(device != 1 for _, device in calls)


@pytest.mark.parametrize("torch", [None, fake_cuda([8], [5], initialised=False)[0]])
def test_no_accelerator_is_unavailable_not_zero(monkeypatch: pytest.MonkeyPatch, torch: object):
    monkeypatch.setitem(sys.modules, "torch", torch)
    with measure() as cost:
        pass
    assert cost.peak_accelerator_bytes == UNAVAILABLE
