"""Sizes of calibration batches."""

from typing import Any

import pytest
import torch

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.data.batch_sizes import batch_size_of

GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("device", "longest", "size"),
    [(None, None, 16), ("cpu", 8, 16), ("cuda", None, 64), (GPU, 100, 64), (GPU, 200, 40),
     (GPU, 512, 16), (GPU, 100_000, 16)],
)  # fmt: skip
def test_auto_goes_by_the_device_and_the_longest_text(device, longest, size):
    assert batch_size_of("auto", device, longest) == size
    assert batch_size_of(7, device, longest) == 7


def test_the_setting_is_auto_or_a_number():
    assert FeatCalSettings().batch_size == "auto"
    assert FeatCalSettings(batch_size=3).batch_size == 3
    values: list[Any] = [0, "many", 1.5, True]
    for wrong in values:
        with pytest.raises(ValueError, match=r"batch_size must be auto or an integer >= 1"):
            FeatCalSettings(batch_size=wrong)
