"""Patches of a convolution: their product with the weights is the convolution."""

from typing import Any

import pytest
import torch
from torch import nn

from fusion_bench_featcal.core import patches
from fusion_bench_featcal.modules import sites

GEOMETRIES: list[dict[str, Any]] = [
    {"kernel_size": 3},
    {"kernel_size": (2, 3), "stride": (3, 1), "padding": (1, 2)},
    {"kernel_size": (3, 2), "dilation": (2, 3), "padding": 2, "padding_mode": "reflect"},
    {"kernel_size": 2, "stride": 2, "dilation": 3, "padding": (0, 3), "padding_mode": "circular"},
    {"kernel_size": (4, 3), "dilation": (2, 1), "padding": "same"},
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rows_times_weights_are_the_convolution(geometry, monkeypatch) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 3, **geometry, bias=False, dtype=torch.float64)
    x = torch.randn(5, 2, 9, 7, dtype=torch.float64)
    site = sites.site_of("convolution", convolution)
    assert site is not None and site.patches is not None
    unfolded = site.patches
    rows, expected = unfolded.rows(x), convolution(x).flatten(2).transpose(1, 2)
    torch.testing.assert_close(rows @ convolution.weight.flatten(1).T, expected)
    positions = rows.shape[1]
    assert unfolded.positions(x) == positions
    for most, samples in ((3 * positions, 3), (positions - 1, 1)):
        monkeypatch.setattr(patches, "MOST_ROWS", most)
        pieces = [one for one, _ in unfolded.pieces([x, x])]
        assert torch.equal(torch.cat(pieces), rows) and len(pieces[0]) == samples
