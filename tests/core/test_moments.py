"""Moments of rows: sums of the definition, however rows come."""

import pytest
import torch
from tiny_models import normal

from fusion_bench_featcal.core import moments
from fusion_bench_featcal.core.moments import Moments


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("maps", [1, 2])
def test_sums_are_those_of_the_definition(
    maps: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "MOST_ROWS", 4)  # the last part has one row
    x, y = normal(1, 9, maps * 3).double(), normal(2, 9, maps * 2).double()
    weights = normal(3, 9).double().exp() if weighted else None
    sums = Moments.zeros(1, maps, 3, 2, x)
    sums.add(0, x, y, weights)
    sums.mirrored()
    w = torch.ones(9, dtype=torch.float64) if weights is None else weights
    for number in range(maps):
        of_x, of_y = x.unflatten(1, (maps, 3))[:, number], y.unflatten(1, (maps, 2))[:, number]
        expected = (of_x.T * w) @ of_x, (of_y.T * w) @ of_x, w @ of_x, w @ of_y
        result = (part[0, number] for part in (sums.gram, sums.cross, sums.x, sums.y))
        for pair in zip(result, expected, strict=True):
            torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums.count, w.sum().expand_as(sums.count))
