"""Each mistake that is easily made must be noticed by the check that guards against it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from oracle import Knobs
from problems import (
    EXACT,
    Problem,
    assert_equal,
    assert_least_squares,
    assert_stationary,
    random_problem,
    solve_both,
    solve_weight,
)
from test_norm_solve import channel_by_channel, random_norms, sums
from torch import Tensor

from fusion_bench_featcal.core import solve as solve_module
from fusion_bench_featcal.core import solve_bias, solve_norm

KNOBS = Knobs()


@pytest.fixture
def problem() -> Problem:
    problem = random_problem(30)
    assert_least_squares(problem, solve_both(problem, KNOBS), KNOBS, EXACT)
    assert_stationary(problem, solve_weight(problem, KNOBS).weight, KNOBS, EXACT)
    return problem


def assert_both_notice(problem: Problem, found: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(AssertionError, match="relative distance"):
        assert_least_squares(problem, found, KNOBS, 1e-6)
    with pytest.raises(AssertionError, match="gradient"):
        assert_stationary(problem, found[0], KNOBS, 1e-6)


def test_transposed_cross_moment(problem: Problem):
    turned = {t: replace(m, cross_exp=m.cross_exp.T) for t, m in problem.moments().items()}
    assert_both_notice(problem, solve_both(problem, KNOBS, turned))


def test_dropped_task_weight(problem: Problem, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(solve_module, "weight_of_norm", lambda norm, _eps: torch.ones_like(norm))
    assert_both_notice(problem, solve_both(problem, KNOBS))


@pytest.mark.parametrize("bias", [-1e-3, 1e-3, -4e-4])
def test_biased_norm(problem: Problem, monkeypatch: pytest.MonkeyPatch, bias: float):
    exact: Callable[[Tensor], Tensor] = solve_module.norm_of_lower
    monkeypatch.setattr(solve_module, "norm_of_lower", lambda m: exact(m) * (1 + bias))
    assert_both_notice(problem, solve_both(problem, KNOBS))


def test_gram_of_the_expert_side(problem: Problem):
    swapped = replace(problem, x_cal=problem.x_exp)
    assert_both_notice(problem, solve_both(swapped, KNOBS))


def test_mixed_up_alpha(problem: Problem):
    assert_both_notice(problem, solve_both(problem, replace(KNOBS, alpha=1 - KNOBS.alpha)))


def test_undivided_gram(problem: Problem):
    undivided = {t: replace(m, weight=m.weight + 1) for t, m in problem.moments().items()}
    found = solve_both(problem, KNOBS, undivided)
    with pytest.raises(AssertionError, match="relative distance"):
        assert_least_squares(problem, found, KNOBS, 1e-6)


def test_bias_from_the_expert_mean(problem: Problem):
    """mu_tgt is the mean of the mix, not of the expert's inputs."""
    wrong = {t: replace(m, sum_cal=m.sum_exp) for t, m in problem.moments().items()}
    found = solve_both(problem, KNOBS, wrong)
    with pytest.raises(AssertionError, match="relative distance"):
        assert_least_squares(problem, found, KNOBS, 1e-6)


def test_bias_solved_with_the_merged_weight(problem: Problem):
    solution = solve_weight(problem, KNOBS)
    bias = solve_bias(
        problem.moments(),
        problem.weights,
        problem.biases,
        problem.merged[0],
        solution.task_weights,
        problem.anchor(KNOBS.rho, 1),
        mix_alpha=KNOBS.alpha,
        ridge_lambda=KNOBS.lam,
    )
    with pytest.raises(AssertionError, match="relative distance"):
        assert_least_squares(problem, (solution.weight, bias), KNOBS, 1e-6)


def test_anchor_without_extrapolation(problem: Problem):
    assert_both_notice(problem, solve_both(problem, replace(KNOBS, rho=1.0)))


def test_norm_weighted_by_number_of_rows():
    inputs, affines, anchor = random_norms(8)
    inputs["task_0"] = inputs["task_0"].repeat(4, 1)[:77]
    wanted = channel_by_channel(inputs, affines, anchor, 0.05)
    right = sums(inputs)
    assert_equal(solve_norm(right, affines, anchor, ridge_lambda=0.05, eps=0.0), wanted, EXACT)
    pooled = {task: replace(m, weight=torch.tensor(40.0).double()) for task, m in right.items()}
    found = solve_norm(pooled, affines, anchor, ridge_lambda=0.05, eps=0.0)
    with pytest.raises(AssertionError, match="relative distance"):
        assert_equal(found, wanted, 1e-6)
