"""What the sums of a task's rows must satisfy (Eqs. 13, 14, 56)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import EXACT, FLOAT32_BOUND, assert_close, random_problem
from torch import Tensor

from fusion_bench_featcal.core import (
    LinearSums,
    drift_norm_sum,
    frobenius_norm,
    linear_moments,
    moments,
    norm_moments,
    normalised_input,
    products,
    task_weight,
)

NAN, INF = float("nan"), float("inf")
ROWS, WIDTH = 37, 5


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch):
    """Small problems need several pieces of rows, strips and tiles."""
    monkeypatch.setattr(moments, "MOST_ROWS", 10)
    monkeypatch.setattr(products, "SMALL", 2)


def values(sums: Any) -> tuple[Tensor, ...]:
    return tuple(vars(sums).values())


def pair(rows: int = ROWS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    problem = random_problem(0, rows=rows, width=width)
    return problem.x_cal["task_1"][:rows], problem.x_exp["task_1"][:rows]


def written_out(cal: Tensor, exp: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """The definition, in float64."""
    cal, exp, p = cal.double(), exp.double(), weights.double()
    weighted = p[:, None] * cal
    drift = (p[:, None] * (cal - exp).square()).sum()
    return weighted.T @ cal, exp.T @ weighted, weighted.sum(0), p @ exp, p.sum(), drift


WEIGHTS: dict[str, Tensor | None] = {
    "none": None,
    "whole numbers": torch.arange(ROWS).remainder(4).double(),
    "ramp": torch.linspace(0, 1, ROWS).double(),
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_sums_are_those_of_the_definition(weights: Tensor | None):
    cal, exp = pair()
    p = torch.ones(ROWS).double() if weights is None else weights
    assert_close(values(linear_moments(cal, exp, weights)), written_out(cal, exp, p))
    z = normalised_input(cal, 1e-5)
    assert_close(values(norm_moments(z, weights)), (p @ z, p @ z.square(), p.sum()))
    mask = None if weights is None else p[None] > 0
    found = drift_norm_sum(cal[None], exp[None], mask)
    counts = p > 0
    error = (cal - exp)[counts].square().sum(dim=1)
    assert found.rows == int(counts.sum())
    wanted = (error.sqrt().sum(), error.sum(), exp[counts].square().sum())
    for ours, theirs in zip((found.drift, found.drift_sq, found.expert_sq), wanted, strict=True):
        assert ours == pytest.approx(float(theirs), rel=EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_rows_are_summed_in_float32_or_as_asked(dtype: torch.dtype):
    cal, exp = (side.to(dtype) for side in pair(rows=400))
    wanted = written_out(cal, exp, torch.ones(len(cal)))
    sums = values(linear_moments(cal, exp))
    assert all(value.dtype is torch.float32 for value in sums)
    assert_close(sums, wanted, FLOAT32_BOUND)
    assert_close(values(linear_moments(cal, exp, dtype=torch.float64)), wanted)
    z = normalised_input(cal, 1e-3)
    assert z.dtype is torch.float32
    assert_close((z,), (normalised_input(cal.double(), 1e-3),), FLOAT32_BOUND)


@pytest.mark.parametrize("sizes", [(37,), (1,) * 37, (5, 0, 30, 2), (36, 1)], ids=str)
def test_batches_add_up(sizes: tuple[int, ...]):
    cal, exp = pair()
    z, weights = normalised_input(cal, 1e-5), torch.linspace(0.1, 2, ROWS).double()
    parts = zip(*(side.split(list(sizes)) for side in (cal, exp, z, weights)), strict=True)
    linear, norm = zip(
        *((linear_moments(c, e, p), norm_moments(n, p)) for c, e, n, p in parts), strict=True
    )
    assert_close(values(sum(linear[1:], linear[0])), values(linear_moments(cal, exp, weights)))
    assert_close(values(sum(norm[1:], norm[0])), values(norm_moments(z, weights)))


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("as_mask", [False, True])
def test_rows_of_weight_zero_are_dropped_and_not_multiplied(poison: float, as_mask: bool):
    cal, exp = pair()
    valid = torch.arange(ROWS) % 3 > 0
    linear = linear_moments(cal[valid], exp[valid])
    norm = norm_moments(normalised_input(cal[valid], 1e-5))
    cal[~valid], exp[~valid] = poison, -poison
    weights = valid if as_mask else valid.double()
    assert_close(values(linear_moments(cal, exp, weights)), values(linear))
    assert_close(values(norm_moments(normalised_input(cal, 1e-5), weights)), values(norm))


ONES = torch.ones(2, 3)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    *(
        (lambda bad=bad, sums=sums: sums(torch.tensor(bad)), "row_weights")
        for bad in ([1.0, -1.0], [1.0, NAN], [1.0])
        for sums in (lambda p: linear_moments(ONES, ONES, p), lambda p: norm_moments(ONES, p))
    ),
    (lambda: linear_moments(ONES, torch.ones(5, 3)), r"\(2, 3\).*\(5, 3\)"),
    (lambda: linear_moments(ONES[None], ONES[None]), r"\(1, 2, 3\)"),
    (lambda: LinearSums(ONES, mix_alpha=0.3).add(ONES, ONES[:1], None), r"\(2, 3\).*\(1, 3\)"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_weights_and_shapes_that_do_not_fit_are_refused(call: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_cross_is_the_moment_of_the_mixed_target(alpha: float):
    cal, exp = pair()
    sums, target = linear_moments(cal, exp), alpha * exp + (1 - alpha) * cal
    assert_close((sums.cross(alpha),), (target.T @ cal / len(cal),))
    assert_close((sums.means(alpha, torch.float64).mean_target,), (target.mean(dim=0),))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("outputs", [0, 3, 4])
def test_means_of_running_sums_are_those_of_whole_matrices(weighted: bool, outputs: int):
    """`W_i C_i` is summed from the rows where the modules' outputs are at most half the width."""
    cal, exp = pair(rows=40, width=8)
    p = torch.linspace(0.1, 2, 40).double() if weighted else torch.ones(40).double()
    weights = {"a": torch.eye(8)[:1].double(), "b": torch.ones(outputs, 8).double()}
    sums = LinearSums(cal, mix_alpha=0.3, expert_weights=weights if outputs else None)
    for part in torch.arange(40).split([3, 21, 5, 0, 11]):
        sums.add(cal[part], exp[part], p[part] if weighted else None)
    found, share = sums.means(), (p / p.sum())[:, None]
    target = 0.3 * exp + 0.7 * cal
    cross = (share * target).T @ cal
    assert_close((found.mean_cal, found.mean_target), ((share.T @ cal)[0], (share.T @ target)[0]))
    assert_close((found.gram.tril(),), ((cal.T @ (share * cal)).tril(),))
    assert set(found.reached) == (set(weights) if outputs == 3 else set())
    if found.reached:
        assert found.shift is None
        assert_close(tuple(found.reached.values()), tuple(w @ cross for w in weights.values()))
    else:
        assert found.shift is not None
        assert_close((found.shift,), (cross.T - cal.T @ (share * cal),))


def test_equal_features_leave_no_shift_at_all():
    cal = pair()[0].float()
    sums = LinearSums(cal, mix_alpha=0.3)
    sums.add(cal, cal.clone(), None)
    shift = sums.means().shift
    assert shift is not None and not shift.any()


def test_task_weight_floors_the_norm_at_eps():
    cal, exp = pair()
    sums, norm = linear_moments(cal, exp), float((cal.T @ cal / ROWS).square().sum().sqrt())
    assert float(task_weight(sums, 0.0)) == pytest.approx(1 / norm, rel=EXACT)
    assert float(task_weight(sums, 10 * norm)) == pytest.approx(0.1 / norm, rel=EXACT)
    dead = linear_moments(torch.zeros(5, 3), torch.zeros(5, 3))
    assert float(task_weight(dead, 1e-8)) == pytest.approx(1e8)
    with pytest.raises(ZeroDivisionError, match="zero"):
        task_weight(dead, 0.0)


def test_normalised_input_is_a_layer_norm_without_affine():
    cal, _ = pair()
    centred = cal - cal.mean(dim=1, keepdim=True)
    spread = (centred.square().mean(dim=1, keepdim=True) + 1e-3).sqrt()
    assert_close((normalised_input(cal, 1e-3),), (centred / spread,))


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lower_half_of_a_symmetric_matrix_tells_everything(size: int, dtype: torch.dtype):
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(size), dtype=dtype)
    whole = x + x.T
    half = whole.tril() + torch.full((size, size), NAN, dtype=dtype).triu(1)
    wanted = frobenius_norm(whole)
    torch.testing.assert_close(products.norm_of_lower(half), wanted, rtol=2e-7, atol=0)
    products.mirror_lower(half)
    assert torch.equal(half, whole)
