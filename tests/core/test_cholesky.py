"""Factors and solves by blocks are LAPACK's, to rounding."""

import pytest
import torch

from fusion_bench_featcal.core import cholesky


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cholesky, "BLOCK", 8)


def system_of(size: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(2 * size, size, generator=torch.Generator().manual_seed(seed)).double()
    return x.T @ x / size + 0.1 * torch.eye(size).double()


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 29])
def test_factor_and_solutions_are_lapacks_and_the_right_side_stays(size: int):
    system = system_of(size)
    wanted = torch.linalg.cholesky(system)
    scribbled = system.tril() + torch.ones(size, size).triu(1) * 1e3
    found, failed = cholesky.cholesky_by_blocks(scribbled)
    assert int(failed) == 0
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    for outputs in (1, 5):
        right = system_of(max(size, outputs), seed=1)[:outputs, :size]
        kept = right.clone()
        solution = cholesky.solve_by_blocks(right, wanted)
        torch.testing.assert_close(solution @ system, right, rtol=0, atol=1e-11)
        assert torch.equal(right, kept)


@pytest.mark.parametrize("bad", [0, 7, 8, 20, 28])
def test_a_matrix_without_a_factor_is_told(bad: int):
    system = system_of(29)
    system[bad, bad] = -1.0
    assert int(cholesky.cholesky_by_blocks(system)[1]) != 0
    with pytest.raises(cholesky.UnsolvedError, match="factorisation failed"):
        signs = cholesky.factor_of(system).signs.tolist()
        cholesky.trusted_condition(signs, size=29, floor=0.0, rounding=1e-16)
