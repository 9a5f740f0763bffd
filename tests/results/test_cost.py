"""Cost of a block: its time, memory and energy."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusion_bench_featcal.results import cost, measure

MEBIBYTE = 2**20


def test_a_block_is_timed_and_its_memory_seen() -> None:
    with measure() as result:
        block = np.ones(64 * MEBIBYTE, dtype=np.uint8)
        time.sleep(0.1)
        result.more["expert_bytes"] = 10
    assert block.sum() == 64 * MEBIBYTE
    assert isinstance(result.seconds, float) and result.seconds >= 0.1
    assert isinstance(result.peak_rss_bytes, int) and result.peak_rss_bytes > 64 * MEBIBYTE
    assert result.as_dict()["expert_bytes"] == 10


def test_energy_is_the_sum_over_devices_in_use_or_unknown() -> None:
    cuda: Any = SimpleNamespace(get_device_properties=lambda n: SimpleNamespace(uuid=f"card-{n}"))
    joules = {"card-0": 10.0, "card-1": 0.0, "card-2": 0.0}
    after = {"card-0": 10.0 + 7200, "card-1": 99.0, "card-2": 1800.0}
    assert cost._energy(joules, after, cuda, [0, 2]) == pytest.approx(2.5)  # watt-hours
    assert cost._energy(joules, joules, cuda, [0, 2]) is None  # counters that do not move
    assert cost._energy({}, {}, cuda, [0]) is None  # no library
