"""Symmetric matrices of which one half was formed."""

import pytest
import torch

from fusion_bench_featcal.core import frobenius_norm, products
from fusion_bench_featcal.core.products import mirror_lower, norm_of_lower


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "SMALL", 4)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lower_half_tells_everything(size: int, dtype: torch.dtype):
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(size), dtype=dtype)
    whole = x + x.T
    half = whole.tril() + torch.full((size, size), torch.nan, dtype=dtype).triu(1)
    wanted = frobenius_norm(whole)
    torch.testing.assert_close(norm_of_lower(half), wanted, rtol=2e-7, atol=0)
    mirror_lower(half)
    assert torch.equal(half, whole)
