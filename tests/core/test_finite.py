"""NaN and infinity are found in one pass, whatever the dtype."""

import pytest
import torch

from fusion_bench_featcal.core.finite import all_finite, not_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finiteness_is_told_for_sums_that_overflow_and_for_real_infinities(dtype: torch.dtype):
    assert all_finite(torch.full((4,), torch.finfo(dtype).max, dtype=dtype))
    for bad in (torch.nan, torch.inf):
        assert not all_finite(torch.tensor([0.0, bad], dtype=dtype))
    assert not all_finite(torch.tensor([torch.inf, -torch.inf], dtype=dtype))


def test_whole_numbers_are_finite():
    assert all_finite(torch.tensor([2**62, 2**62]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_sign_of_what_is_not_finite_needs_no_look(dtype: torch.dtype):
    entries = torch.linspace(-60000, 60000, 1000).to(dtype)
    assert not_finite(entries).shape == () and not not_finite(entries)
    assert not not_finite(torch.empty(0, 3, dtype=dtype))
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not_finite(torch.cat([entries, torch.tensor([bad], dtype=dtype)]))
    assert not_finite(torch.tensor([torch.inf, -torch.inf], dtype=dtype))
    assert not_finite(torch.empty(3, dtype=dtype, device="meta")).device.type == "meta"
