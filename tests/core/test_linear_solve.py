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
    assert_stationary,
    objective,
    random_problem,
    solve_both,
    solve_weight,
)

from fusion_bench_featcal.core import UnsolvedError, extrapolate_anchor, solve_bias, solve_linear

# float32 rows and sums: bound on the weight's and bias's relative error
FLOAT32_BOUND = 2e-6
EXACT_GRID = [knobs for knobs in GRID if knobs.eps == 0]
PAPER = Knobs()


@pytest.mark.parametrize("knobs", GRID, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_weight_and_bias_solve_the_stacked_least_squares(seed: int, knobs: Knobs):
    problem = random_problem(seed)
    assert_least_squares(problem, solve_both(problem, knobs), knobs, EXACT)


@pytest.mark.parametrize("knobs", GRID, ids=str)
def test_float32_statistics_stay_within_their_bound(knobs: Knobs):
    problem = random_problem(2, rows=200, width=24).cast(torch.float32)
    assert_least_squares(problem, solve_both(problem, knobs), knobs, FLOAT32_BOUND)


@pytest.mark.parametrize("knobs", EXACT_GRID, ids=str)
def test_gradient_is_zero_at_the_weight(knobs: Knobs):
    problem = random_problem(3)
    assert_stationary(problem, solve_weight(problem, knobs).weight, knobs, EXACT)


@pytest.mark.parametrize("knobs", EXACT_GRID, ids=str)
def test_no_perturbation_lowers_the_objective(knobs: Knobs):
    problem = random_problem(4)
    weight = solve_weight(problem, knobs).weight
    best = objective(problem, weight, knobs)
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-1, 10.0):
        step = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        assert objective(problem, weight + size * step, knobs) > best
    assert best <= objective(problem, problem.merged[0], knobs)


def test_task_weight_is_the_inverse_norm_of_the_mean_gram():
    problem = random_problem(5)
    found = solve_weight(problem, PAPER).task_weights
    assert list(found) == list(problem.x_cal)
    for task, x in problem.x_cal.items():
        norm = sum(float(v) ** 2 for v in (x.T @ x / len(x)).flatten()) ** 0.5
        assert float(found[task]) == pytest.approx(1 / norm, rel=EXACT)


def as_one_model(problem: Problem) -> Problem:
    """One expert = merged = base, and the features of one model."""
    task = next(iter(problem.x_cal))
    weight, bias = problem.base
    return Problem(
        x_cal={task: problem.x_exp[task]},
        x_exp={task: problem.x_exp[task]},
        weights={task: weight},
        biases={task: bias},
        merged=(weight, bias),
        base=(weight, bias),
    )


@pytest.mark.parametrize("knobs", EXACT_GRID, ids=str)
def test_one_expert_that_is_merged_and_base_moves_nothing(knobs: Knobs):
    problem = as_one_model(random_problem(6))
    assert_equal(solve_both(problem, knobs), problem.merged, EXACT)


@pytest.mark.parametrize("lam", [0.05, 1e-5])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_eps_shifts_the_no_op_by_at_most_its_share(eps: float, lam: float):
    # one task seen along one direction leaves the others to lambda and eps: the worst case
    problem = as_one_model(random_problem(6))
    narrow = problem.with_inputs(lambda _task, x: x * torch.eye(x.shape[1])[0].double())
    for candidate in (problem, narrow):
        weight = solve_weight(candidate, Knobs(lam=lam, eps=eps)).weight
        shift = (weight - problem.merged[0]).norm() / problem.merged[0].norm()
        assert float(shift) <= eps / (lam + eps) * (1 + EXACT) + 1e-15
    assert float(shift) > 0.1 * eps / (lam + eps)


@pytest.mark.parametrize("rho", [2.0, 1.0, 0.0, -0.5])
def test_infinite_ridge_gives_the_anchor(rho: float):
    problem = random_problem(7)
    wanted = tuple(
        rho * merged + (1 - rho) * base
        for merged, base in zip(problem.merged, problem.base, strict=True)
    )
    gaps = []
    for lam in (1e6, 1e9, 1e12):
        found = solve_both(problem, Knobs(rho=rho, lam=lam))
        gaps.append(max(float((a - b).norm()) for a, b in zip(found, wanted, strict=True)))
    assert gaps[1] < 2e-3 * gaps[0]
    assert gaps[2] < 1e-8
    if rho == 1:
        assert_equal(solve_both(problem, Knobs(rho=1.0, lam=1e12)), problem.merged, EXACT)


@pytest.mark.parametrize("rho", [2.2, 1.0, 0.5, 0.0, -1.0])
def test_anchor_extrapolates_from_base_through_merged(rho: float):
    merged, base = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0])
    wanted = torch.tensor([3 * rho + (1 - rho), rho + 2 * (1 - rho)])
    assert_equal((extrapolate_anchor(merged, base, rho),), (wanted,), 1e-7)


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


@pytest.mark.parametrize("knobs", GRID, ids=str)
def test_order_of_rows_and_tasks_and_repeated_samples_change_nothing(knobs: Knobs):
    problem = random_problem(9)
    wanted = solve_both(problem, knobs)
    generator = torch.Generator().manual_seed(1)
    orders = {t: torch.randperm(len(x), generator=generator) for t, x in problem.x_cal.items()}
    shuffled = problem.with_inputs(lambda task, x: x[orders[task]])
    assert_equal(solve_both(shuffled, knobs), wanted, EXACT)
    # one task's samples twice: its means, and so everything, stay
    repeated = problem.with_inputs(lambda task, x: x.repeat(2, 1) if task == "task_1" else x)
    assert_equal(solve_both(repeated, knobs), wanted, EXACT)
    backwards = replace(problem, x_cal=dict(reversed(problem.x_cal.items())))
    assert_equal(solve_both(backwards, knobs), wanted, EXACT)


def test_every_task_twice_is_half_the_ridge():
    problem = random_problem(10)
    tables = ("x_cal", "x_exp", "weights", "biases")
    doubled = replace(
        problem,
        **{
            name: dict(getattr(problem, name))
            | {f"{task}_again": value for task, value in getattr(problem, name).items()}
            for name in tables
        },
    )
    wanted = solve_both(problem, Knobs(lam=0.05))
    assert_equal(solve_both(doubled, Knobs(lam=0.1)), wanted, EXACT)


@pytest.mark.parametrize("knobs", EXACT_GRID, ids=str)
def test_scaling_one_task_leaves_the_weight_but_moves_the_bias(knobs: Knobs):
    problem = random_problem(11)
    scaled = problem.with_inputs(lambda task, x: 7.0 * x if task == "task_0" else x)
    weight, bias = solve_both(problem, knobs)
    scaled_weight, scaled_bias = solve_both(scaled, knobs)
    assert_equal((scaled_weight,), (weight,), EXACT)
    assert float((scaled_bias - bias).norm() / bias.norm()) > 1e-3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lam", [0.0, 1e-12])
def test_expert_target_and_vanishing_ridge_never_raise_the_module_drift(seed: int, lam: float):
    problem = random_problem(seed, drift=1.5)
    knobs = Knobs(alpha=1.0, lam=lam, rho=2.0)

    def module_drift(weight: torch.Tensor) -> float:
        return float(objective(problem, weight, Knobs(alpha=1.0, lam=0.0)))

    after, before = (
        module_drift(solve_weight(problem, knobs).weight),
        module_drift(problem.merged[0]),
    )
    assert after <= before * (1 + 1e-9)


def test_mix_zero_ignores_the_expert_features():
    problem = random_problem(12)
    garbled = replace(problem, x_exp={task: -5 * x for task, x in problem.x_exp.items()})
    knobs = Knobs(alpha=0.0)
    assert_equal(solve_both(garbled, knobs), solve_both(problem, knobs), EXACT)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_solved_as_the_numbers_they_are(dtype: torch.dtype):
    problem = random_problem(14, rows=300, width=16).cast(dtype)
    assert_least_squares(problem, solve_both(problem, PAPER), PAPER, FLOAT32_BOUND)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_statistics_are_refused(poison: float):
    problem = random_problem(15)
    problem.x_cal["task_1"][2, 3] = poison
    with pytest.raises(UnsolvedError):
        solve_weight(problem, PAPER)


def test_non_finite_expert_weight_is_refused():
    problem = random_problem(16)
    problem.weights["task_1"][0, 0] = float("nan")
    with pytest.raises(UnsolvedError):
        solve_weight(problem, PAPER)


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
