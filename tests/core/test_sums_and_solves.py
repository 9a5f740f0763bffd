"""Sums over rows, ridge systems, and values that are not finite."""

import math

import pytest
import torch
from calibrations import gamma
from tiny_models import normal
from torch import Tensor

from fusion_bench_featcal.core import moments, products
from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.core.solve import UnsolvedError, solve_ridge

EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize("few", [1, 3, 1024])  # no rows wait, some do, all do
def test_moments_equal_their_definition_for_any_split(monkeypatch: pytest.MonkeyPatch, few: int):
    monkeypatch.setattr(moments, "MOST_ROWS", 4)  # the last part has one row
    monkeypatch.setattr(moments, "FEW_ROWS", few)
    x, y = normal(1, 9, 3).double(), normal(2, 9, 2).double()
    whole, first, second = (moments.Moments.zeros(3, 2, x) for _ in range(3))
    whole.add(x, y)
    first.add(x[:4], y[:4])
    second.add(x[4:], y[4:])
    expected = x.T @ x, y.T @ x, x.sum(0), y.sum(0), torch.tensor(9.0, dtype=torch.float64)
    both = first.mirrored()
    both += second.mirrored()
    for sums in (whole.mirrored(), both):
        for pair in zip(sums.tensors(), expected, strict=True):
            torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)
    means = whole.means(centred=True)
    torch.testing.assert_close(means.gram, torch.cov(x.T, correction=0))
    torch.testing.assert_close(whole.energy(centred=True), (x - x.mean(0)).square().sum())
    torch.testing.assert_close(whole.row_weight(0.0), 1 / (x.T @ x).norm())


def test_rows_that_wait_are_those_that_were_added():
    x, y = normal(1, 9, 3), normal(2, 9, 2)
    sums, expected = moments.Moments.zeros(3, 2, x), (x.T @ x, y.T @ x)
    sums.add(x, y)
    x.zero_()
    y.zero_()
    torch.testing.assert_close((sums.mirrored().gram, sums.cross), expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("counts", [(5, 3), (5, 30), (30, 5), (30, 30), (9, 9), (5, 0)])
def test_products_with_few_rows_are_those_with_their_moments(
    counts: tuple[int, int], weighted: bool
):
    width, weight, parts = 32, normal(9, 4, 32).double(), list[moments.Moments]()
    for number, count in enumerate(counts):
        sums, rows = moments.Moments.zeros(width, 0, weight), normal(number, count, width).double()
        sums.add(rows, weights=rows[:, 0].square() if weighted else None)
        parts.append(sums.mirrored())
        assert (sums.rows is not None) == (0 < 2 * count < width)
    whole, other = parts
    whole += other
    assert (whole.rows is not None) == (0 not in counts and 2 * sum(counts) < width)
    torch.testing.assert_close(whole.squares(weight), ((weight @ whole.gram) * weight).sum())
    torch.testing.assert_close(whole.times(weight), weight @ whole.gram)
    whole.merge(other, weight.new_ones(()))
    torch.testing.assert_close(whole.times(weight), weight @ whole.gram)


def test_a_weight_counts_a_row_so_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(moments, "MOST_ROWS", 4)
    x, y = normal(1, 9, 3).double(), normal(2, 9, 2).double()
    often = torch.tensor([2, 1, 5, 1, 1, 3, 1, 2, 1])
    weighted, repeated = (moments.Moments.zeros(3, 2, x) for _ in range(2))
    weighted.add(x[:5], y[:5], often[:5].float())
    weighted.add(x[5:], y[5:], often[5:].float())
    repeated.add(x.repeat_interleave(often, 0), y.repeat_interleave(often, 0))
    pairs = zip(weighted.mirrored().tensors(), repeated.mirrored().tensors(), strict=True)
    for pair in pairs:
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)


def test_sums_of_rows_wider_than_a_tile_are_whole_products_and_symmetric():
    rows = normal(3, 50, 2 * products.SMALL + 7).double()
    sums = moments.Moments.zeros(rows.shape[1], 0, rows)
    for part in rows.split(20):
        sums.add(part)
    gram, bound = sums.mirrored().gram, 2 * gamma(len(rows), torch.float64)
    assert ((gram - rows.T @ rows).abs() <= bound * rows.abs().T @ rows.abs()).all()
    assert torch.equal(gram, gram.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_are_symmetric_to_the_last_bit_at_every_width(dtype: torch.dtype):
    for width in (*range(1, 40), products.SMALL + 1, 2 * products.SMALL + 13):
        sums = moments.Moments.zeros(width, 1, torch.zeros(0, dtype=dtype))
        sums.add(1 + normal(width, 9, width).to(dtype))
        gram = sums.mirrored().means(centred=True).gram
        assert torch.equal(gram, gram.T), width


def system(rank: int = 20) -> tuple[Tensor, Tensor]:
    """Gram and cross matrix of a few rows of width 6."""
    rows = normal(1, rank, 6)
    return rows.T @ rows / 20, normal(2, 3, 6)


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 0.5])
def test_solutions_satisfy_the_normal_equations(ridge: float):
    gram, right = system()
    expected = right @ torch.linalg.inv(gram + ridge * torch.eye(6, dtype=torch.float64))
    before = gram.clone()
    step, residual = solve_ridge(gram, right, ridge, rounding=EPS)
    torch.testing.assert_close(step, expected, rtol=1e-10, atol=1e-12)
    assert residual < 1e-12 and torch.equal(gram, before)


def test_float32_is_solved_in_float64_unless_it_is_exact_enough():
    gram, right = (part.float() for part in system())
    assert solve_ridge(gram, right, 0.5, rounding=1e-7)[0].dtype == torch.float32
    assert solve_ridge(gram, right, 1e-3, rounding=1e-7)[0].dtype == torch.float64
    for width, size in ((6, 1e5), (600, 1e4)):
        right = normal(4, 3, width).float()
        gram = torch.diag(torch.tensor([1e12, *[1.0] * (width - 1)]))
        gram[0, 1:] = gram[1:, 0] = size  # float32 cannot add the ridge to the first entry
        exact, _ = solve_ridge(gram.double(), right.double(), 0.5, rounding=EPS)
        solved, _ = solve_ridge(gram, right, 0.5, rounding=1e-20)
        torch.testing.assert_close(solved, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("rank", "value", "ridge", "rounding", "message"),
    [
        (20, math.nan, 0.5, EPS, "are not solved"),
        (3, 1.0, 0.0, EPS, "singular"),
        (3, 1.0, 1e-9, 1e-6, "singular"),  # the ridge is below the rounding of the rows
    ],
)
def test_systems_without_a_solution_are_refused(rank, value, ridge, rounding, message) -> None:
    gram, right = system(rank)
    right[0, 0] = value
    with pytest.raises(UnsolvedError, match=message):
        solve_ridge(gram, right, ridge, rounding=rounding)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_value_that_is_not_finite_is_found(dtype: torch.dtype):
    largest = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)  # whose sum overflows
    assert all_finite(largest) and all_finite(torch.tensor([2**62, 2**62]))
    for bad in ([torch.nan], [torch.inf], [torch.inf, -torch.inf]):
        assert not all_finite(torch.cat([largest, torch.tensor(bad, dtype=dtype)]))
