"""What the solve of linear modules must satisfy (Eqs. 11, 14-17, 51-55)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import Knobs
from problems import (
    EXACT,
    FLOAT32_BOUND,
    GRID,
    Problem,
    assert_close,
    normal,
    random_problem,
    solve_both,
    solve_weight,
)
from torch import Tensor

from fusion_bench_featcal.core import (
    LinearSystem,
    UnsolvedError,
    extrapolate_anchor,
    solve,
    solve_linear,
)
from fusion_bench_featcal.core.cholesky import SINGLE_LAMBDA

PAPER = Knobs()
NARROW = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("knobs", GRID, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, *NARROW], ids=str)
def test_weight_and_bias_solve_the_stacked_least_squares(dtype: torch.dtype, knobs: Knobs):
    """Moments of the rows as they are, rounded to any dtype."""
    problem = random_problem(2, rows=200, width=16).cast(dtype)
    bound = EXACT if dtype is torch.float64 else FLOAT32_BOUND
    assert_close(solve_both(problem, knobs), problem.truth(knobs), bound)


@pytest.mark.parametrize("knobs", GRID, ids=str)
def test_bias_without_base_drops_lambda_on_both_sides(knobs: Knobs):
    problem = random_problem(8)
    found = solve_both(problem, knobs, has_base=False)
    assert_close(found, problem.truth(knobs, has_base=False))


def test_anchor_without_base_needs_rho_one():
    merged = torch.tensor([3.0, 1.0])
    assert torch.equal(extrapolate_anchor(merged, None, 1.0).float(), merged)
    with pytest.raises(ValueError, match=r"anchor_rho.*2\.0.*base"):
        extrapolate_anchor(merged, None, 2.0)


def fold(problems: dict[str, Problem], knobs: Knobs) -> LinearSystem:
    """The sums of modules on the same inputs."""
    system = LinearSystem({n: p.anchor(knobs.rho) for n, p in problems.items()}, eps=knobs.eps)
    first = next(iter(problems.values()))
    for task, moments in first.moments().items():
        means = moments.means(knobs.alpha, moments.gram.dtype)
        weights = {name: problem.weights[task] for name, problem in problems.items()}
        biases = {name: problem.biases[task] for name, problem in problems.items()}
        system.fold(task, means, weights, biases)
    return system


WIDE = (300, torch.float32, PAPER, 2e-5)  # sums and factors are made in pieces


@pytest.mark.parametrize(
    ("width", "dtype", "knobs", "bound"),
    [
        *((6, torch.float64, knobs, EXACT) for knobs in GRID),
        *((24, torch.float32, knobs, 5e-6) for knobs in GRID),
        WIDE,
    ],
    ids=str,
)
def test_modules_that_share_an_input_each_get_their_own_solution(
    width: int, dtype: torch.dtype, knobs: Knobs, bound: float
):
    query = random_problem(20, rows=4 * width, width=width).cast(dtype)
    other = random_problem(99, width=width, outputs=9).cast(dtype)
    key = replace(other, x_cal=query.x_cal, x_exp=query.x_exp)
    problems = {"query": query, "key": key}
    system = fold(problems, knobs)
    for name, problem in problems.items():
        weight = system.solve(knobs.lam).weights[name]
        bias = system.solve_bias(name, weight, problem.anchor(knobs.rho, 1), knobs.lam)
        assert_close((weight, bias), problem.truth(knobs), bound)


def test_no_op_is_exact():
    """Everything equal: the difference to the anchor is zero to the last bit at eps = 0."""
    problem = random_problem(24)
    still = replace(
        problem,
        x_cal=problem.x_exp,
        weights=dict.fromkeys(problem.weights, problem.base[0]),
        biases=dict.fromkeys(problem.biases, problem.base[1]),
        merged=problem.base,
    )
    for dtype in (torch.float64, torch.float32):
        narrow = still.cast(dtype)
        weight = fold({"only": narrow}, Knobs()).solve(0.05).weights["only"]
        assert torch.equal(weight.to(dtype), narrow.base[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_rank_deficient_system_needs_a_ridge(seed: int, dtype: torch.dtype):
    direction = normal(torch.Generator().manual_seed(seed), 8)
    problem = random_problem(seed, tasks=2, rows=30, width=8)
    problem = problem.without(direction / direction.norm()).cast(dtype)
    # bfloat16 rounding would fill the unseen direction, so there the shortage is of rows
    if dtype is torch.bfloat16:
        problem = random_problem(seed, tasks=1, rows=3, width=8).cast(dtype)
    with pytest.raises(UnsolvedError, match="singular"):
        solve_weight(problem, Knobs(lam=0.0))
    bound = EXACT if dtype is torch.float64 else FLOAT32_BOUND
    assert_close(solve_both(problem, PAPER), problem.truth(PAPER), bound)


@pytest.mark.parametrize("lam", [0.05, 1e-5])
def test_one_sample_is_enough_with_a_ridge(lam: float):
    problem, knobs = random_problem(13, rows=1), Knobs(lam=lam)
    assert_close(solve_both(problem, knobs), problem.truth(knobs))
    with pytest.raises(UnsolvedError):
        solve_weight(random_problem(13, tasks=1, rows=1), Knobs(lam=0.0))


@pytest.mark.parametrize("smallest", [1.0, 1e-2, 1e-6, 1e-10])
def test_solution_is_float64_and_tells_residual_and_condition(smallest: float):
    """The condition within a factor of two."""
    generator = torch.Generator().manual_seed(5)
    basis = torch.linalg.qr(normal(generator, 40, 40)).Q
    # A ramp of eigenvalues: the pivots' ratio misses their spread by far.
    roots = torch.logspace(torch.tensor(smallest).log10().item() / 2, 0, 40).double()
    inputs = {"task_0": roots[:, None] * basis}
    problem = random_problem(17, tasks=1, width=40)
    solution = solve_weight(replace(problem, x_cal=inputs, x_exp=inputs), Knobs(lam=0.0))
    assert 0.5 / smallest <= solution.condition <= 1.001 / smallest
    assert solution.weight.dtype is torch.float64
    assert 0 <= solution.residual < 1e-9


@pytest.mark.parametrize(
    ("dtype", "ridge_lambda", "wanted"),
    [
        (torch.float32, SINGLE_LAMBDA, torch.float32),
        (torch.float32, 0.99 * SINGLE_LAMBDA, torch.float64),
        (torch.float64, 1.0, torch.float64),
    ],
)
def test_float32_solves_only_where_lambda_bounds_the_condition(
    dtype: torch.dtype, ridge_lambda: float, wanted: torch.dtype
):
    system = fold({"only": random_problem(27).cast(dtype)}, Knobs())
    assert system.solve(ridge_lambda).weights["only"].dtype == wanted


def test_a_float32_solution_beyond_its_limit_is_solved_again_in_float64(monkeypatch):
    system = fold({"only": random_problem(28).cast(torch.float32)}, Knobs())
    residuals = {torch.float32: 0.9e-5, torch.float64: 0.9e-6}
    original = solve.solve_factorised

    def estimated(lower: Tensor, matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return original(lower, matrix, right)[0], torch.tensor(residuals[matrix.dtype])

    monkeypatch.setattr(solve, "solve_factorised", estimated)
    assert system.solve(0.05).weights["only"].dtype == torch.float32
    residuals[torch.float32] = 1.1e-5
    found = system.solve(0.05)
    assert found.weights["only"].dtype == torch.float64
    assert found.residuals["only"] == pytest.approx(0.9e-6)
    for residuals[torch.float64], told in ((1.1e-6, r"1\.1e-06"), (float("nan"), "nan")):
        with pytest.raises(UnsolvedError, match=f"residual {told}") as raised:
            system.solve(0.05)
        assert raised.value.module == "only"


def test_sums_outlast_their_solves_at_any_lambda():
    problem = random_problem(29)
    moments = problem.moments()
    kept = {task: (m.gram.clone(), m.sum_cal.clone()) for task, m in moments.items()}
    anchor = problem.anchor(2.0)
    solve_linear(moments, problem.weights, anchor, mix_alpha=0.3, ridge_lambda=0.05, eps=0.0)
    for task, (gram, sum_cal) in kept.items():
        assert torch.equal(moments[task].gram, gram) and torch.equal(moments[task].sum_cal, sum_cal)
    system = fold({"only": problem}, Knobs())
    first = system.solve(0.05).weights["only"]
    assert not torch.allclose(system.solve(5.0).weights["only"], first)
    assert torch.equal(system.solve(0.05).weights["only"], first)


def test_tasks_that_cannot_be_folded_are_refused():
    problem = random_problem(25)
    system = fold({"only": problem}, Knobs())
    means = problem.moments()["task_0"].means(0.3, torch.float64)
    weights = {"only": problem.weights["task_0"]}
    with pytest.raises(ValueError, match="task_0"):
        system.fold("task_0", means, weights, {})
    with pytest.raises(ValueError, match="some tasks and not for others"):
        system.fold("new", replace(means, reached=weights), weights, {})
    system.solve(0.05)
    with pytest.raises(ValueError, match="have been solved"):
        system.fold("new", means, weights, {})


def test_more_expert_weights_than_moments_changes_nothing_and_fewer_is_an_error():
    problem = random_problem(18)
    wanted = solve_weight(problem, PAPER).weight
    extra = replace(problem, weights=problem.weights | {"other": torch.ones(4, 6).double()})
    assert torch.equal(solve_weight(extra, PAPER).weight, wanted)
    fewer = {task: weight for task, weight in problem.weights.items() if task != "task_2"}
    with pytest.raises(KeyError, match="task_2"):
        solve_weight(replace(problem, weights=fewer), PAPER)


@pytest.mark.parametrize(
    ("table", "poison"), [("x_cal", torch.nan), ("x_cal", torch.inf), ("weights", torch.nan)]
)
def test_what_is_not_finite_is_refused(table: str, poison: float):
    problem = random_problem(15)
    getattr(problem, table)["task_1"][2, 3] = poison
    with pytest.raises(UnsolvedError):
        solve_weight(problem, PAPER)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("knobs", [Knobs(), Knobs(alpha=0.0, lam=1e-3), Knobs(alpha=1.0, lam=3.0)])
def test_error_bound_of_leaving_experts_out(seed: int, knobs: Knobs):
    """|W' - W| <= sum over what is left out of w_i |C_i|_2 |W_i - W_mer|_F / (lambda + eps)."""
    problem = random_problem(seed, rows=30, width=7)
    merged, tasks = problem.merged[0], list(problem.weights)
    left_out = dict.fromkeys(tasks[: 1 + seed % len(tasks)], merged)
    full: Any = solve_weight(problem, knobs)
    served = solve_weight(replace(problem, weights=problem.weights | left_out), knobs)
    bound, moments = 0.0, problem.moments()
    for task in left_out:
        off = torch.linalg.matrix_norm(problem.weights[task] - merged)
        spread = torch.linalg.matrix_norm(moments[task].cross(knobs.alpha), 2)
        bound += float(full.task_weights[task] * spread * off)
    gap = float(torch.linalg.matrix_norm(served.weight - full.weight))
    assert 0 < gap <= bound / (knobs.lam + knobs.eps)
    assert served.task_weights == full.task_weights  # the Gram matrices stay
