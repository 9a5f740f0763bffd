"""The engine's running sums give what `core.solve`, the definition, gives."""

import pytest
import torch
from oracle import Knobs
from problems import EXACT, GRID, Problem, assert_equal, random_problem, solve_both, solve_weight
from test_norm_solve import random_norms, sums
from torch import Tensor

from fusion_bench_featcal.core import FoldedLinear, FoldedNorm, UnsolvedError, solve_norm
from fusion_bench_featcal.core.cholesky import SINGLE_LAMBDA, check_residual, estimated_condition
from fusion_bench_featcal.core.folded import TaskMeans

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


def fold(problems: dict[str, Problem], knobs: Knobs) -> FoldedLinear:
    anchors = {name: problem.anchor(knobs.rho) for name, problem in problems.items()}
    folded = FoldedLinear(anchors, mix_alpha=knobs.alpha, eps=knobs.eps)
    first = next(iter(problems.values()))
    for task, moments in first.moments().items():
        weights = {name: problem.weights[task] for name, problem in problems.items()}
        biases = {name: problem.biases[task] for name, problem in problems.items()}
        folded.add(task, moments, weights, biases)
    return folded


def unfold(
    folded: FoldedLinear, name: str, problem: Problem, knobs: Knobs
) -> tuple[Tensor, Tensor]:
    weight = folded.solve(name, ridge_lambda=knobs.lam).weight
    anchor = problem.anchor(knobs.rho, 1)
    return weight, folded.solve_bias(name, weight, anchor, ridge_lambda=knobs.lam)


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
    found = folded.solve("only", ridge_lambda=knobs.lam)
    assert list(found.task_weights) == list(wanted.task_weights)
    for task, weight in wanted.task_weights.items():
        assert float(found.task_weights[task]) == pytest.approx(float(weight), rel=EXACT)
        assert folded.gram_norms[task] == pytest.approx(1 / float(weight), rel=EXACT)
    assert found.condition == pytest.approx(wanted.condition, rel=1e-6)
    assert found.residual < 1e-12


def test_missing_base_drops_lambda_from_the_bias():
    problem, knobs = random_problem(23), Knobs(rho=1.0)
    folded = fold({"only": problem}, knobs)
    weight = folded.solve("only", ridge_lambda=knobs.lam).weight
    found = folded.solve_bias("only", weight, None, ridge_lambda=knobs.lam)
    assert_equal((found,), (folded.solve_bias("only", weight, None, ridge_lambda=0.0),), EXACT)
    with_base = folded.solve_bias("only", weight, problem.anchor(1.0, 1), ridge_lambda=knobs.lam)
    assert float((with_base - found).norm()) > 1e-4


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
        weight = folded.solve("only", ridge_lambda=0.05).weight
        assert torch.equal(weight.to(dtype), narrow.base[0])


def test_task_is_folded_only_once():
    problem = random_problem(25)
    folded = fold({"only": problem}, Knobs())
    moments = problem.moments()["task_0"]
    with pytest.raises(ValueError, match="task_0"):
        folded.add("task_0", moments, {"only": problem.weights["task_0"]}, {})


def test_folding_leaves_the_statistics_alone():
    problem = random_problem(26)
    moments = problem.moments()
    kept = {task: (m.gram.clone(), m.sum_cal.clone()) for task, m in moments.items()}
    folded = FoldedLinear({"only": problem.anchor(2.0)}, mix_alpha=0.3, eps=0.0)
    for task, m in moments.items():
        folded.add(task, m, {"only": problem.weights[task]}, {"only": problem.biases[task]})
    for task, (gram, sum_cal) in kept.items():
        assert torch.equal(moments[task].gram, gram)
        assert torch.equal(moments[task].sum_cal, sum_cal)


def test_a_later_tasks_means_may_be_shared():
    """Modules that share their inputs in a later task only, and had products of their own."""
    names, width, alpha = ("key", "value"), 8, 0.3
    draw = torch.Generator().manual_seed(3)

    def matrix(rows: int = width) -> Tensor:
        return torch.randn(rows, width, generator=draw, dtype=torch.float64)

    anchors = {name: matrix(2) for name in names}
    experts = [{name: matrix(2) for name in names} for _ in range(3)]
    grams, shifts = ([x.T @ x for x in (matrix(20), matrix(20), matrix(20))] for _ in range(2))

    def means(index: int, *, formed: bool) -> TaskMeans:
        """A task's means, with the cross moment or with the products that stand for it."""
        cross = grams[index] + shifts[index]
        reached = {} if formed else {n: w @ cross for n, w in experts[index].items()}
        return TaskMeans(
            gram=grams[index].clone(),
            shift=shifts[index].clone() if formed else None,
            reached=reached,
            mean_cal=torch.ones(width).double(),
            mean_target=torch.ones(width).double(),
            rounding=1e-16,
        )

    shared = {i: means(i, formed=True) for i in (1, 2)}
    for name in names:
        found, wanted = (
            FoldedLinear({name: anchors[name]}, mix_alpha=alpha, eps=1e-8) for _ in range(2)
        )
        for index, weights in enumerate(experts):
            formed = index > 0
            found.add_means(str(index), shared.get(index) or means(0, formed=False), weights, {})
            wanted.add_means(str(index), means(index, formed=formed), weights, {})
        ours, theirs = (f.solve(name, ridge_lambda=0.05).weight for f in (found, wanted))
        assert_equal((ours,), (theirs,), EXACT)
        by_definition = sum(
            weight * (experts[i][name] @ (grams[i] + shifts[i]))
            for i, weight in enumerate(found.task_weights.values())
        )
        system = sum(w * grams[i] for i, w in enumerate(found.task_weights.values()))
        eye = torch.eye(width, dtype=torch.float64)
        direct = (by_definition + 0.05 * anchors[name]) @ torch.linalg.inv(system + 0.05 * eye)
        assert_equal((ours,), (direct,), 1e-6)


def test_unsolvable_sums_are_refused():
    problem = random_problem(27, tasks=1, rows=3, width=8)
    folded = fold({"only": problem}, Knobs(lam=0.0))
    with pytest.raises(UnsolvedError, match="singular"):
        folded.solve("only", ridge_lambda=0.0)


@pytest.mark.parametrize("lam", [0.0, 0.05, 3.0])
@pytest.mark.parametrize("has_base", [True, False])
def test_norm_sums_give_the_same_affine(lam: float, has_base: bool):
    inputs, affines, anchor = random_norms(7)
    pull = anchor if has_base else None
    folded = FoldedNorm()
    for task, moments in sums(inputs).items():
        folded.add(moments, affines[task])
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
    assert folded.propose("only", ridge_lambda=ridge_lambda)[0].dtype == wanted


def test_a_float32_solution_beyond_its_limit_is_solved_again_in_float64():
    folded = fold({"only": random_problem(28).cast(torch.float32)}, Knobs())
    folded.propose("only", ridge_lambda=0.05)
    assert folded.check({"only": torch.tensor(1.1e-5)}) is None
    weight, residual = folded.propose("only", ridge_lambda=0.05)
    assert weight.dtype == torch.float64
    assert folded.check({"only": residual}) is not None
    with pytest.raises(UnsolvedError, match=r"residual 1\.1e-06"):
        folded.check({"only": torch.tensor(1.1e-6)})


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
