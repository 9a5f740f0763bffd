"""Merged weights from sums: unseen directions, channels of other sizes, grouped maps."""

from typing import Any

import pytest
import torch
from tiny_models import normal
from torch import Tensor

from fusion_bench_featcal.core.least_squares import shrink_off_diagonal, solve_seen
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.rules import Linear
from fusion_bench_featcal.rules.regmean import LeastSquaresSums


def stacked(*weights: Tensor) -> Linear:
    """Weights of several maps, without biases."""
    return Linear(torch.stack(weights), weights[0].new_zeros(len(weights), len(weights[0])))


def merged(tasks: list[tuple[tuple[Tensor, ...], Linear]], anchor: Linear) -> Tensor:
    """Weights of all maps, from each task's inputs of the maps and its expert."""
    sums: Any = LeastSquaresSums(anchor, off_diagonal=0.9)
    for inputs, expert in tasks:
        moments = Moments.zeros(1, len(inputs), inputs[0].shape[1], 1, inputs[0])
        moments.add(0, torch.cat(inputs, 1), None)
        sums.add("a", moments.mirrored(), expert)
    return sums.solve().linear.weight


def test_maps_of_a_convolution_with_groups_are_solved_one_by_one() -> None:
    inputs = [normal(seed, 2, 20, 5) for seed in range(3)]
    weights = [normal(10 + seed, 2, 4, 5) for seed in range(3)]
    anchor = normal(20, 2, 4, 5)
    tasks = [((*x,), stacked(*w)) for x, w in zip(inputs, weights, strict=True)]
    alone = [
        merged([((x[k],), stacked(w[k])) for x, w in zip(inputs, weights, strict=True)],
               stacked(anchor[k]))
        for k in range(2)
    ]  # fmt: skip
    torch.testing.assert_close(merged(tasks, stacked(*anchor)), torch.cat(alone))


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
    torch.testing.assert_close(solution, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dead", [False, True])
def test_a_known_floor_changes_the_way_but_not_the_result(dead: bool) -> None:
    x = normal(0, 3, 6)
    x[:, 2] *= 0.0 if dead else 1e-3
    gram = shrink_off_diagonal(x.T @ x, 0.9)
    right = normal(1, 4, 6) @ gram
    quick, rank = solve_seen(gram, right, precision=torch.float64, floor=0.1)
    slow, slow_rank = solve_seen(gram, right, precision=torch.float64)
    assert rank == slow_rank == (5 if dead else 6)
    torch.testing.assert_close(quick, slow, rtol=1e-9, atol=1e-11)
