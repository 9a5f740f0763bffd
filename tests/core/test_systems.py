"""Sums over tasks, folded one at a time, give what whole statistics of every task give."""

from dataclasses import replace

import pytest
import torch
from oracle import Knobs
from problems import EXACT, GRID, Problem, assert_equal, random_problem, solve_both, solve_weight
from test_norm_solve import random_norms, sums
from torch import Tensor

from fusion_bench_featcal.core import LinearSystem, NormSystem, UnsolvedError, solve, solve_norm
from fusion_bench_featcal.core.cholesky import SINGLE_LAMBDA, check_residual, estimated_condition

FLOAT32_BOUND = 2e-6  # the same float32 sums, folded in float32 and solved in float64


def second_module(problem: Problem, seed: int = 99) -> Problem:
    """Another module on the same inputs, with another number of outputs."""
    other = random_problem(seed, width=problem.merged[0].shape[1], outputs=9)
    return Problem(
        x_cal=problem.x_cal,
        x_exp=problem.x_exp,
        weights=other.weights,
        biases=other.biases,
        merged=other.merged,
        base=other.base,
    )


def fold(problems: dict[str, Problem], knobs: Knobs) -> LinearSystem:
    anchors = {name: problem.anchor(knobs.rho) for name, problem in problems.items()}
    folded = LinearSystem(anchors, eps=knobs.eps)
    first = next(iter(problems.values()))
    for task, moments in first.moments().items():
        weights = {name: problem.weights[task] for name, problem in problems.items()}
        biases = {name: problem.biases[task] for name, problem in problems.items()}
        folded.fold(task, moments.means(knobs.alpha, moments.gram.dtype), weights, biases)
    return folded


def unfold(
    folded: LinearSystem, name: str, problem: Problem, knobs: Knobs
) -> tuple[Tensor, Tensor]:
    weight = folded.solve(knobs.lam).weights[name]
    return weight, folded.solve_bias(name, weight, problem.anchor(knobs.rho, 1), knobs.lam)


@pytest.mark.parametrize("knobs", GRID, ids=str)
def test_modules_that_share_an_input_each_get_their_own_solution(knobs: Knobs):
    query = random_problem(20)
    problems = {"query": query, "key": second_module(query)}
    folded = fold(problems, knobs)
    for name, problem in problems.items():
        assert_equal(unfold(folded, name, problem, knobs), solve_both(problem, knobs), EXACT)


@pytest.mark.parametrize("knobs", GRID, ids=str)
def test_float32_sums_stay_within_their_bound(knobs: Knobs):
    problem = random_problem(21, rows=200, width=24).cast(torch.float32)
    folded = fold({"only": problem}, knobs)
    found = unfold(folded, "only", problem, knobs)
    assert_equal(found, solve_both(problem, knobs), FLOAT32_BOUND)


def test_task_weights_residual_and_condition_are_reported_alike():
    problem, knobs = random_problem(22), Knobs()
    folded, wanted = fold({"only": problem}, knobs), solve_weight(problem, knobs)
    found = folded.solve(knobs.lam)
    assert list(folded.task_weights) == list(wanted.task_weights)
    for task, weight in wanted.task_weights.items():
        assert float(folded.task_weights[task]) == pytest.approx(float(weight), rel=EXACT)
        assert folded.gram_norms[task] == pytest.approx(1 / float(weight), rel=EXACT)
    assert found.condition == pytest.approx(wanted.condition, rel=1e-6)
    assert found.residuals["only"] < 1e-12


def test_no_op_is_exact():
    """Everything equal: the difference to the anchor is zero to the last bit at eps = 0."""
    problem = random_problem(24)
    still = Problem(
        x_cal=problem.x_exp,
        x_exp=problem.x_exp,
        weights={task: problem.base[0] for task in problem.weights},
        biases={task: problem.base[1] for task in problem.biases},
        merged=problem.base,
        base=problem.base,
    )
    for dtype in (torch.float64, torch.float32):
        narrow = still.cast(dtype)
        folded = fold({"only": narrow}, Knobs())
        weight = folded.solve(0.05).weights["only"]
        assert torch.equal(weight.to(dtype), narrow.base[0])


def test_tasks_that_cannot_be_folded_are_refused():
    problem = random_problem(25)
    folded = fold({"only": problem}, Knobs())
    means = problem.moments()["task_0"].means(0.3, torch.float64)
    weights = {"only": problem.weights["task_0"]}
    with pytest.raises(ValueError, match="task_0"):
        folded.fold("task_0", means, weights, {})
    with pytest.raises(ValueError, match="some tasks and not for others"):
        folded.fold("new", replace(means, reached=weights), weights, {})
    folded.solve(0.05)
    with pytest.raises(ValueError, match="have been solved"):
        folded.fold("new", means, weights, {})


def test_solving_leaves_the_statistics_alone():
    problem = random_problem(26)
    moments = problem.moments()
    kept = {task: (m.gram.clone(), m.sum_cal.clone()) for task, m in moments.items()}
    anchor = problem.anchor(2.0)
    solve.solve_linear(moments, problem.weights, anchor, mix_alpha=0.3, ridge_lambda=0.05, eps=0.0)
    for task, (gram, sum_cal) in kept.items():
        assert torch.equal(moments[task].gram, gram)
        assert torch.equal(moments[task].sum_cal, sum_cal)


def test_sums_are_solved_at_one_lambda_after_another():
    problem = random_problem(29)
    folded = fold({"only": problem}, Knobs())
    first = folded.solve(0.05).weights["only"]
    assert not torch.allclose(folded.solve(5.0).weights["only"], first)
    assert torch.equal(folded.solve(0.05).weights["only"], first)


@pytest.mark.parametrize("lam", [0.0, 0.05, 3.0])
@pytest.mark.parametrize("has_base", [True, False])
def test_norm_sums_give_the_same_affine(lam: float, has_base: bool):
    inputs, affines, anchor = random_norms(7)
    pull = anchor if has_base else None
    folded = NormSystem()
    for task, moments in sums(inputs).items():
        folded.fold(moments, affines[task])
    found = folded.solve(pull, ridge_lambda=lam, eps=1e-8)
    wanted = solve_norm(sums(inputs), affines, pull, ridge_lambda=lam, eps=1e-8)
    assert_equal(found, wanted, EXACT)


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
    folded = fold({"only": random_problem(27).cast(dtype)}, Knobs())
    assert folded.solve(ridge_lambda).weights["only"].dtype == wanted


def test_a_float32_solution_beyond_its_limit_is_solved_again_in_float64(monkeypatch):
    folded = fold({"only": random_problem(28).cast(torch.float32)}, Knobs())
    residuals = {torch.float32: 1.1e-5, torch.float64: 0.9e-6}
    original = solve.solve_factorised

    def estimated(lower: Tensor, system: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return original(lower, system, right)[0], torch.tensor(residuals[system.dtype])

    monkeypatch.setattr(solve, "solve_factorised", estimated)
    found = folded.solve(0.05)
    assert found.weights["only"].dtype == torch.float64
    assert found.residuals["only"] == pytest.approx(0.9e-6)
    residuals[torch.float64] = 1.1e-6
    with pytest.raises(UnsolvedError, match=r"residual 1\.1e-06") as raised:
        folded.solve(0.05)
    assert raised.value.module == "only"


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-6), (torch.float32, 1e-5)], ids=str
)
def test_residuals_are_limited_by_what_was_solved_in(dtype: torch.dtype, limit: float):
    check_residual(0.9 * limit, dtype)
    for residual in (1.1 * limit, float("nan")):
        with pytest.raises(UnsolvedError):
            check_residual(residual, dtype)


@pytest.mark.parametrize("smallest", [1.0, 1e-2, 1e-6, 1e-10])
def test_condition_is_estimated_within_a_factor_of_two(smallest: float):
    generator = torch.Generator().manual_seed(5)
    basis = torch.linalg.qr(torch.randn(40, 40, generator=generator).double()).Q
    # A ramp of eigenvalues: the pivots' ratio misses their spread by far.
    eigenvalues = torch.logspace(torch.tensor(smallest).log10().item(), 0, 40).double()
    system = basis * eigenvalues @ basis.T
    condition = float(estimated_condition(system, torch.linalg.cholesky(system)))
    assert 0.5 / smallest <= condition <= 1.001 / smallest
