"""Ridge systems: solutions that are checked, and systems that have none."""

import math

import pytest
import torch
from tiny_models import normal
from torch import Tensor

from fusion_bench_featcal.core.solve import UnsolvedError, solve_ridge

EPS = torch.finfo(torch.float64).eps


def system(width: int = 6, rank: int | None = None) -> tuple[Tensor, Tensor]:
    rows, right = normal(1, rank or 20, width).double(), normal(2, 3, width).double()
    return rows.T @ rows / 20, right


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 0.5])
def test_solutions_are_those_of_the_normal_equations(ridge: float) -> None:
    gram, right = system()
    expected = right @ torch.linalg.inv(gram + ridge * torch.eye(6, dtype=torch.float64))
    before = gram.clone()
    step, residual = solve_ridge(gram, right, ridge, rounding=EPS)
    torch.testing.assert_close(step, expected, rtol=1e-10, atol=1e-12)
    assert residual < 1e-12 and torch.equal(gram, before)


def test_float32_stays_only_where_it_is_exact_enough() -> None:
    gram, right = (part.float() for part in system())
    assert solve_ridge(gram, right, 0.5, rounding=1e-7)[0].dtype == torch.float32
    assert solve_ridge(gram, right, 1e-3, rounding=1e-7)[0].dtype == torch.float64
    for width, size in ((6, 1e5), (600, 1e4)):
        right = normal(4, 3, width).float()
        gram = torch.diag(torch.tensor([1e12, *[1.0] * (width - 1)]))
        gram[0, 1:] = gram[1:, 0] = size  # float32 holds no shift of the first entry
        exact, _ = solve_ridge(gram.double(), right.double(), 0.5, rounding=EPS)
        solved, _ = solve_ridge(gram, right, 0.5, rounding=1e-20)
        assert solved.dtype == torch.float64
        torch.testing.assert_close(solved, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_no_solution(value: float) -> None:
    gram, right = system()
    right[0, 0] = value
    with pytest.raises(UnsolvedError, match="stay unsolved"):
        solve_ridge(gram, right, 0.5, rounding=EPS)


def test_singular_systems_need_a_ridge() -> None:
    gram, right = system(rank=3)
    with pytest.raises(UnsolvedError, match="singular"):
        solve_ridge(gram, right, 0.0, rounding=EPS)
    with pytest.raises(UnsolvedError, match="singular"):  # less than the rounding of the rows
        solve_ridge(gram, right, 1e-9, rounding=1e-6)
    assert torch.isfinite(solve_ridge(gram, right, 0.1, rounding=EPS)[0]).all()
