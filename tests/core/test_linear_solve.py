"""What the solve of a linear module must satisfy (Eqs. 11, 14-17, 51-55)."""

from dataclasses import replace

import pytest
import torch
from oracle import Knobs
from problems import (
    EXACT,
    GRID,
    Problem,
    assert_equal,
    assert_least_squares,
    random_problem,
    solve_both,
    solve_weight,
)

from fusion_bench_featcal.core import UnsolvedError, extrapolate_anchor, solve_bias, solve_linear

# float32 rows and sums: bound on the weight's and bias's relative error
FLOAT32_BOUND = 2e-6
PAPER = Knobs()


@pytest.mark.parametrize("knobs", GRID, ids=str)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.float64, EXACT),
        (torch.float32, FLOAT32_BOUND),
        (torch.bfloat16, FLOAT32_BOUND),
        (torch.float16, FLOAT32_BOUND),
    ],
    ids=str,
)
def test_weight_and_bias_solve_the_stacked_least_squares(
    dtype: torch.dtype, bound: float, knobs: Knobs
):
    """Of the rows as they are, rounded to any dtype."""
    problem = random_problem(2, rows=200, width=16).cast(dtype)
    assert_least_squares(problem, solve_both(problem, knobs), knobs, bound)


def test_anchor_without_base_needs_rho_one():
    merged = torch.tensor([3.0, 1.0])
    assert torch.equal(extrapolate_anchor(merged, None, 1.0).float(), merged)
    with pytest.raises(ValueError, match=r"anchor_rho.*2\.0.*base"):
        extrapolate_anchor(merged, None, 2.0)


@pytest.mark.parametrize("knobs", GRID, ids=str)
def test_bias_without_base_drops_lambda_on_both_sides(knobs: Knobs):
    problem = random_problem(8)
    solution = solve_weight(problem, knobs)
    found = solve_bias(
        problem.moments(),
        problem.weights,
        problem.biases,
        solution.weight,
        solution.task_weights,
        None,
        mix_alpha=knobs.alpha,
        ridge_lambda=knobs.lam,
    )
    top = torch.zeros_like(found)
    for task, x in problem.x_cal.items():
        target = knobs.alpha * problem.x_exp[task] + (1 - knobs.alpha) * x
        error = problem.biases[task] + target @ problem.weights[task].T - x @ solution.weight.T
        top += solution.task_weights[task] * error.mean(dim=0)
    total = sum(float(weight) for weight in solution.task_weights.values())
    assert_equal((found,), (top / total,), EXACT)


def one_direction_short(rows: int, dtype: torch.dtype, seed: int) -> Problem:
    """All tasks together leave at least one input direction unseen."""
    problem = random_problem(seed, tasks=2, rows=rows, width=8)
    generator = torch.Generator().manual_seed(seed)
    unseen = torch.randn(8, generator=generator, dtype=torch.float64)
    unseen = unseen / unseen.norm()
    return problem.with_inputs(lambda _task, x: x - (x @ unseen)[:, None] * unseen).cast(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_rank_deficient_system_needs_a_ridge(seed: int, dtype: torch.dtype):
    # bfloat16 rounding would fill the unseen direction, so there the shortage is of rows
    problem = one_direction_short(30, dtype, seed)
    if dtype is torch.bfloat16:
        problem = random_problem(seed, tasks=1, rows=3, width=8).cast(dtype)
    with pytest.raises(UnsolvedError, match="singular"):
        solve_weight(problem, Knobs(lam=0.0))
    knobs = Knobs(lam=0.05)
    bound = EXACT if dtype is torch.float64 else FLOAT32_BOUND
    assert_least_squares(problem, solve_both(problem, knobs), knobs, bound)


@pytest.mark.parametrize("lam", [0.05, 1e-5])
def test_one_sample_is_enough_with_a_ridge(lam: float):
    problem = random_problem(13, rows=1)
    assert_least_squares(problem, solve_both(problem, Knobs(lam=lam)), Knobs(lam=lam), EXACT)
    single = random_problem(13, tasks=1, rows=1)
    with pytest.raises(UnsolvedError):
        solve_weight(single, Knobs(lam=0.0))


def test_solution_is_float64_and_reports_its_quality():
    problem = random_problem(17).cast(torch.float32)
    solution = solve_weight(problem, PAPER)
    assert solution.weight.dtype is torch.float64
    assert 0 <= solution.residual < 1e-9
    gram = sum(
        float(solution.task_weights[task]) * (x.double().T @ x.double() / len(x))
        for task, x in problem.x_cal.items()
    )
    true_condition = float(torch.linalg.cond(gram + 0.05 * torch.eye(6).double()))
    assert 1 <= solution.condition <= true_condition * (1 + 1e-4)


def test_more_expert_weights_than_moments_changes_nothing_and_fewer_is_an_error():
    problem = random_problem(18)
    wanted = solve_weight(problem, PAPER).weight
    extra = replace(problem, weights=problem.weights | {"other": torch.ones(4, 6).double()})
    assert torch.equal(solve_weight(extra, PAPER).weight, wanted)
    with pytest.raises(KeyError, match="task_2"):
        solve_linear(
            problem.moments(),
            {task: w for task, w in problem.weights.items() if task != "task_2"},
            problem.anchor(2.0),
            mix_alpha=0.3,
            ridge_lambda=0.05,
            eps=0.0,
        )


@pytest.mark.parametrize(
    ("table", "poison"), [("x_cal", torch.nan), ("x_cal", torch.inf), ("weights", torch.nan)]
)
def test_what_is_not_finite_is_refused(table: str, poison: float):
    problem = random_problem(15)
    getattr(problem, table)["task_1"][2, 3] = poison
    with pytest.raises(UnsolvedError):
        solve_weight(problem, PAPER)
