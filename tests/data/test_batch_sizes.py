"""Sizes of calibration batches."""

import pytest
import torch

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
