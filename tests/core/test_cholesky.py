"""Factors and solves by blocks are LAPACK's, to rounding."""

import pytest
import torch
from oracle import Knobs
from problems import random_problem
from test_systems import fold, second_module

from fusion_bench_featcal.core import UnsolvedError, cholesky
from fusion_bench_featcal.core.cholesky import cholesky_by_blocks, solve_by_blocks

SIZES = [1, 7, 8, 9, 16, 29]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cholesky, "BLOCK", 8)


def system_of(size: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(2 * size, size, generator=torch.Generator().manual_seed(seed)).double()
    return x.T @ x / size + 0.1 * torch.eye(size).double()


@pytest.mark.parametrize("size", SIZES)
def test_the_factor_is_lapacks(size: int):
    system = system_of(size)
    wanted = torch.linalg.cholesky(system)
    found, failed = cholesky_by_blocks(system.tril() + torch.ones(size, size).triu(1) * 1e3)
    assert int(failed) == 0
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("outputs", [1, 5])
def test_solutions_are_lapacks_and_the_right_side_stays(size: int, outputs: int):
    system, right = system_of(size), system_of(max(size, outputs), seed=1)[:outputs, :size]
    kept = right.clone()
    found = solve_by_blocks(right, torch.linalg.cholesky(system))
    torch.testing.assert_close(found @ system, right, rtol=0, atol=1e-11)
    assert torch.equal(right, kept)


@pytest.mark.parametrize("bad", [0, 7, 8, 20, 28])
def test_a_matrix_without_a_factor_is_told(bad: int):
    system = system_of(29)
    system[bad, bad] = -1.0
    assert int(cholesky_by_blocks(system)[1]) != 0
    with pytest.raises(UnsolvedError, match="factorisation failed"):
        signs = cholesky.factor_of(system).signs.tolist()
        cholesky.trusted_condition(signs, size=29, floor=0.0, rounding=1e-16)


@pytest.mark.parametrize("lam", [0.05, 1e-4])
def test_folded_sums_are_solved_alike_by_blocks(lam: float, monkeypatch: pytest.MonkeyPatch):
    """Float32 sums by products, where they are not too weak; what float64 solves stays LAPACK's."""
    query = random_problem(20, rows=200, width=24).cast(torch.float32)
    problems = {"query": query, "key": second_module(query).cast(torch.float32)}
    folded = fold(problems, Knobs(lam=lam))
    found = folded.solve(lam)
    monkeypatch.setattr(cholesky, "_are_products_faster", lambda like: False)
    wanted = folded.solve(lam)
    is_single = lam >= cholesky.SINGLE_LAMBDA
    for name in problems:
        ours, theirs = (solution.weights[name].double() for solution in (found, wanted))
        assert float((ours - theirs).norm() / theirs.norm()) < (1e-5 if is_single else 1e-12)
        assert torch.equal(ours, theirs) == (not is_single)
    assert found.condition == pytest.approx(wanted.condition, rel=1e-3)
