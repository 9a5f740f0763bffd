"""Moments of rows: sums of the definition, however rows come."""

import pytest
import torch
from tiny_models import normal

from fusion_bench_featcal.core import moments
from fusion_bench_featcal.core.moments import Moments


def test_sums_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "MOST_ROWS", 4)  # the last part has one row
    x, y = normal(1, 9, 3).double(), normal(2, 9, 2).double()
    sums, halves = Moments.zeros(3, 2, x), [Moments.zeros(3, 2, x) for _ in range(2)]
    sums.add(x, y)
    halves[0].add(x[:4], y[:4])
    halves[1].add(x[4:], y[4:])
    expected = x.T @ x, y.T @ x, x.sum(0), y.sum(0), torch.tensor(9.0, dtype=torch.float64)
    for of in (sums.mirrored(), halves[0].mirrored() + halves[1].mirrored()):
        for pair in zip(of.tensors(), expected, strict=True):
            torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)
    means = sums.means(centred=True)
    torch.testing.assert_close(means.gram, torch.cov(x.T, correction=0))
    torch.testing.assert_close(sums.energy(centred=True), (x - x.mean(0)).square().sum())
    torch.testing.assert_close(sums.row_weight(0.0), 1 / (x.T @ x).norm())
