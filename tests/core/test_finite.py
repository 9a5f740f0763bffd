"""NaN and infinity are found in one pass, whatever the dtype."""

import pytest
import torch

from fusion_bench_featcal.core.finite import all_finite, not_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_not_finite_is_found(dtype: torch.dtype):
    entries = torch.linspace(-60000, 60000, 1000).to(dtype)
    largest = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)  # whose sum overflows
    assert all_finite(largest) and all_finite(torch.tensor([2**62, 2**62]))
    assert not_finite(entries).shape == () and not not_finite(entries)
    for bad in ([torch.nan], [torch.inf], [-torch.inf], [torch.inf, -torch.inf]):
        spoilt = torch.cat([entries, torch.tensor(bad, dtype=dtype)])
        assert not_finite(spoilt) and not all_finite(spoilt)
