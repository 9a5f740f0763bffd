"""Gain and shift of norms (Eqs. 56 to 59)."""

import torch
from tiny_models import normal

from fusion_bench_featcal.rules import Linear
from fusion_bench_featcal.rules.norms import NormRows, NormSums


def test_a_channel_that_does_not_vary_gives_finite_values() -> None:
    gain, shift = normal(3, 2, 2).double()
    expert = Linear(gain, shift)
    sums = NormSums(expert, 0.0, 1e-8)
    rows = NormRows(2, torch.zeros(1, dtype=torch.float64))
    rows.add(torch.ones(4, 2, dtype=torch.float64))
    sums.add("a", expert, rows)
    solved = sums.solve().linear
    assert torch.isfinite(solved.weight).all() and torch.isfinite(solved.bias).all()
