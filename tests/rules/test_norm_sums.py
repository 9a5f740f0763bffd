"""Gain and shift of norms (Eqs. 56 to 59)."""

import pytest
import torch
from tiny_models import normal

from fusion_bench_featcal.rules.norms import NormRows, NormSums
from fusion_bench_featcal.rules.rule import Linear


def norm(gain: torch.Tensor, shift: torch.Tensor) -> Linear:
    return Linear(gain[None, None], shift[None])


@pytest.mark.parametrize("pull", [0.0, 0.3])
def test_gain_and_shift_are_a_least_squares_of_two_unknowns(pull: float) -> None:
    anchor = norm(*normal(1, 2, 3).double())
    sums = NormSums(anchor, pull, 1e-12)
    system = pull * torch.eye(2, dtype=torch.float64).expand(3, 2, 2).clone()
    right = pull * torch.stack([anchor.weight[0, 0], anchor.bias[0]], -1)
    for task in range(2):
        z, expert = normal(2 + task, 5, 3).double(), norm(*normal(7 + task, 2, 3).double())
        rows = NormRows(3, z[0])
        rows.add(z, None)
        sums.add(str(task), rows, expert)
        unknowns = torch.stack([z, torch.ones_like(z)], -1)  # [rows, channels, 2]
        target = z * expert.weight[0, 0] + expert.bias[0]
        system += torch.einsum("nci,ncj->cij", unknowns, unknowns) / len(z)
        right += torch.einsum("nci,nc->ci", unknowns, target) / len(z)
    expected = torch.linalg.solve(system, right)
    solved = sums.solve().linear
    torch.testing.assert_close(solved.weight[0, 0], expected[:, 0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(solved.bias[0], expected[:, 1], rtol=1e-10, atol=1e-12)


def test_a_channel_that_does_not_vary_gives_finite_values() -> None:
    expert = norm(*normal(3, 2, 2).double())
    sums = NormSums(expert, 0.0, 1e-8)
    rows = NormRows(2, torch.zeros(1, dtype=torch.float64))
    rows.add(torch.ones(4, 2, dtype=torch.float64), None)
    sums.add("a", rows, expert)
    solved = sums.solve().linear
    assert torch.isfinite(solved.weight).all() and torch.isfinite(solved.bias).all()
