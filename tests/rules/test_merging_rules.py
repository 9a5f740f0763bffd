"""Merged weights from sums: known answers, unseen directions, grouped maps."""

from typing import Any

import pytest
import torch
from tiny_models import normal
from torch import Tensor

from fusion_bench_featcal.core.least_squares import shrink_off_diagonal, solve_seen
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.rules.lot import GainSums
from fusion_bench_featcal.rules.norms import NormRows
from fusion_bench_featcal.rules.regmean import LeastSquaresSums
from fusion_bench_featcal.rules.rule import Linear

TASKS = 3


def problem(rows: int = 20, width: int = 5) -> tuple[list[Tensor], list[Tensor], Tensor]:
    inputs = [(1 + i) * normal(i, rows, width) + i for i in range(TASKS)]
    weights = [normal(10 + i, 4, width) for i in range(TASKS)]
    return inputs, weights, normal(20, 4, width)


def stacked(*weights: Tensor) -> Linear:
    """Weights of several maps, without biases."""
    return Linear(torch.stack(weights), weights[0].new_zeros(len(weights), len(weights[0])))


def moments_of(*inputs: Tensor) -> Moments:
    """Sums over the rows of several maps."""
    sums = Moments.zeros(1, len(inputs), inputs[0].shape[1], 1, inputs[0])
    sums.add(0, torch.cat(inputs, 1), None)
    return sums.mirrored()


def merged(
    inputs: list[Tensor], weights: list[Tensor], anchor: Tensor, **options: Any
) -> tuple[Tensor, int]:
    sums = LeastSquaresSums(stacked(anchor), **options)
    for x, weight in zip(inputs, weights, strict=True):
        sums.add("a", moments_of(x), stacked(weight))
    solved = sums.solve()
    return solved.linear.weight[0], solved.facts["seen"]


def test_maps_of_a_convolution_with_groups_are_solved_one_by_one() -> None:
    inputs, weights, anchor = problem()
    flipped, reverse, second = [x.flip(0) for x in inputs], weights[::-1], anchor.flip(1)
    sums = LeastSquaresSums(stacked(anchor, second), off_diagonal=0.9)
    for x, y, weight, w in zip(inputs, flipped, weights, reverse, strict=True):
        sums.add("a", moments_of(x, y), stacked(weight, w))
    alone = [
        merged(inputs, weights, anchor, off_diagonal=0.9)[0],
        merged(flipped, reverse, second, off_diagonal=0.9)[0],
    ]
    both = sums.solve().linear.weight
    torch.testing.assert_close(both, torch.stack(alone), rtol=1e-12, atol=1e-12)


def test_agrees_with_the_stacked_least_squares_problem() -> None:
    for rows, width, expected_rank in ((20, 5, 5), (2, 9, 2 * TASKS)):  # enough rows, and too few
        inputs, weights, anchor = problem(rows, width)
        outputs = torch.cat([x @ w.T for x, w in zip(inputs, weights, strict=True)])
        expected = torch.linalg.lstsq(torch.cat(inputs), outputs).solution.T
        result, rank = merged(inputs, weights, anchor)
        assert rank == expected_rank
        if rank == width:
            torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)
        else:
            torch.testing.assert_close(torch.cat(inputs) @ result.T, outputs, rtol=1e-8, atol=1e-9)


def test_unseen_directions_keep_the_anchor_and_the_others_do_not_care() -> None:
    inputs, weights, anchor = problem()
    inputs = [torch.cat([x, torch.zeros(len(x), 2, dtype=x.dtype)], dim=1) for x in inputs]
    extra = normal(30, 4, 2)
    wide = [torch.cat([w, normal(40 + i, 4, 2)], dim=1) for i, w in enumerate(weights)]
    result, rank = merged(inputs, wide, torch.cat([anchor, extra], dim=1))
    assert rank == 5
    torch.testing.assert_close(result[:, 5:], extra, rtol=1e-12, atol=1e-12)
    other, _ = merged(inputs, wide, torch.cat([anchor + 7, extra], dim=1))
    torch.testing.assert_close(result[:, :5], other[:, :5], rtol=1e-9, atol=1e-11)


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


def test_diagonal_grams_weigh_each_input_by_its_energy() -> None:
    inputs, weights, anchor = problem()
    energies = [(x * x).mean(0) for x in inputs]
    expected = sum(w * e for w, e in zip(weights, energies, strict=True)) / sum(energies)
    result, _ = merged(inputs, weights, anchor, off_diagonal=0.0)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)


def test_gain_is_the_weighted_mean_and_stays_without_energy() -> None:
    def norm(*gain: float) -> Linear:
        return stacked(torch.tensor([gain], dtype=torch.float64))

    sums = GainSums(norm(1.0, 5.0), torch.zeros(1, 2), scale=1.0)
    for energy, gain in ((1.0, (2.0, 9.0)), (3.0, (6.0, 8.0))):
        rows = NormRows(2, torch.zeros(1, dtype=torch.float64))
        rows.add(torch.tensor([[energy**0.5, 0.0]], dtype=torch.float64), None)
        sums.add("a", rows, norm(*gain))
    expected = torch.tensor([5.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(sums.solve().linear.weight[0, 0], expected)
