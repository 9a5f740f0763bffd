"""Merged weights from sums: unseen directions, and channels of other sizes."""

import torch
from calibrations import gamma
from tiny_models import normal

from fusion_bench_featcal.core.least_squares import solve_seen


def test_rounding_of_the_sums_counts_as_unseen() -> None:
    almost_alike = torch.ones(2, 2, dtype=torch.float64) + 1e-9 * torch.eye(2, dtype=torch.float64)
    right = torch.ones(1, 2, dtype=torch.float64)
    assert solve_seen(almost_alike, right, precision=torch.float32)[1] == 1
    assert solve_seen(almost_alike, right, precision=torch.float64)[1] == 2
    small = torch.diag(torch.tensor([1.0, 1e-12], dtype=torch.float64))  # channels of other sizes
    assert solve_seen(small, right, precision=torch.float32)[1] == 2


def test_is_the_moore_penrose_solution_whatever_the_sizes_of_the_channels() -> None:
    x = normal(0, 3, 6) * torch.tensor([1.0, 30.0, 0.1, 1.0, 5.0, 0.0], dtype=torch.float64)
    gram, right = x.T @ x, normal(1, 4, 6) @ (x.T @ x)
    expected = right @ torch.linalg.pinv(gram, hermitian=True, rtol=1e-9)
    solution, rank = solve_seen(gram, right, precision=torch.float64)
    assert rank == 3
    energies = torch.linalg.eigvalsh(gram)[-rank:]
    bound = gamma(len(gram), gram.dtype) * float(energies[-1] / energies[0])
    assert (solution - expected).norm() <= bound * expected.norm()
