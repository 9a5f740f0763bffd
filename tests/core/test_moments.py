"""What the sums of a task's rows must satisfy (Eqs. 13, 14, 56)."""

import pytest
import torch
from oracle import second_moment
from problems import EXACT, Problem, assert_equal, random_problem
from torch import Tensor

from fusion_bench_featcal.core import (
    LinearMoments,
    NormMoments,
    drift_norm_sum,
    linear_moments,
    norm_moments,
    normalised_input,
    task_weight,
)

LINEAR_FIELDS = ("gram", "cross_exp", "sum_cal", "sum_exp", "weight", "drift_sq")
NORM_FIELDS = ("sum_z", "sum_z_sq", "weight")
# float32 sums of a few hundred rows against float64 sums of the same rounded rows
FLOAT32_BOUND = 2e-6


def values(moments: LinearMoments | NormMoments) -> tuple[Tensor, ...]:
    fields = LINEAR_FIELDS if isinstance(moments, LinearMoments) else NORM_FIELDS
    return tuple(getattr(moments, field) for field in fields)


def pair(seed: int = 0, rows: int = 37, width: int = 5) -> tuple[Tensor, Tensor]:
    problem = random_problem(seed, rows=rows, width=width)
    return problem.x_cal["task_1"][:rows], problem.x_exp["task_1"][:rows]


def row_weights(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (rows,), generator=generator).double()


def written_out(cal: Tensor, exp: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """The definition, by einsum in float64."""
    cal, exp, p = cal.double(), exp.double(), weights.double()
    return (
        torch.einsum("n,ni,nj->ij", p, cal, cal),
        torch.einsum("n,ni,nj->ij", p, exp, cal),
        torch.einsum("n,ni->i", p, cal),
        torch.einsum("n,ni->i", p, exp),
        p.sum(),
        torch.einsum("n,ni->", p, (cal - exp).square()),
    )


def test_sums_are_those_of_the_definition():
    cal, exp = pair()
    for weights in (None, row_weights(len(cal)), torch.linspace(0, 1, len(cal)).double()):
        p = torch.ones(len(cal)) if weights is None else weights
        assert_equal(values(linear_moments(cal, exp, weights)), written_out(cal, exp, p), EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_rows_are_summed_in_float32(dtype: torch.dtype):
    cal, exp = (side.to(dtype) for side in pair(rows=400))
    moments = linear_moments(cal, exp)
    assert all(value.dtype is torch.float32 for value in values(moments))
    p = torch.ones(len(cal))
    gram, cross, *rest, drift_sq = values(moments)
    wanted = written_out(cal, exp, p)
    assert_equal((gram, cross, *rest), wanted[:-1], FLOAT32_BOUND)
    # h_cal - h_exp is itself rounded only where it is formed in the narrow dtype
    assert_equal((drift_sq,), wanted[-1:], FLOAT32_BOUND)


def test_sums_keep_float64_and_can_be_asked_for_it():
    cal, exp = pair()
    assert linear_moments(cal, exp).gram.dtype is torch.float64
    wide = linear_moments(cal.float(), exp.float(), dtype=torch.float64)
    assert_equal(values(wide), written_out(cal.float(), exp.float(), torch.ones(len(cal))), EXACT)


@pytest.mark.parametrize("sizes", [(37,), (1,) * 37, (5, 0, 30, 2), (36, 1)], ids=str)
def test_batches_add_up(sizes: tuple[int, ...]):
    cal, exp = pair()
    weights = torch.linspace(0.1, 2, len(cal)).double()
    z = normalised_input(cal, 1e-5)
    whole = values(linear_moments(cal, exp, weights))
    norm_whole = values(norm_moments(z, weights))
    linear: list[LinearMoments] = []
    norm: list[NormMoments] = []
    pieces = (side.split(list(sizes)) for side in (cal, exp, z, weights))
    for cal_part, exp_part, z_part, p in zip(*pieces, strict=True):
        linear.append(linear_moments(cal_part, exp_part, p))
        norm.append(norm_moments(z_part, p))
    assert_equal(values(sum(linear[1:], linear[0])), whole, EXACT)
    assert_equal(values(sum(norm[1:], norm[0])), norm_whole, EXACT)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("as_mask", [False, True])
def test_rows_of_weight_zero_are_dropped_and_not_multiplied(poison: float, as_mask: bool):
    cal, exp = pair()
    valid = torch.arange(len(cal)) % 3 > 0
    broken_cal, broken_exp = cal.clone(), exp.clone()
    broken_cal[~valid], broken_exp[~valid] = poison, -poison
    weights = valid if as_mask else valid.double()
    found = values(linear_moments(broken_cal, broken_exp, weights))
    assert_equal(found, values(linear_moments(cal[valid], exp[valid])), EXACT)
    z = normalised_input(broken_cal, 1e-5)
    wanted = values(norm_moments(normalised_input(cal[valid], 1e-5)))
    assert_equal(values(norm_moments(z, weights)), wanted, EXACT)


@pytest.mark.parametrize("weights", [torch.tensor([1.0, -1.0]), torch.tensor([1.0, float("nan")])])
def test_bad_row_weights_are_refused(weights: Tensor):
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="row_weights"):
        linear_moments(x, x, weights)
    with pytest.raises(ValueError, match="row_weights"):
        norm_moments(x, weights)


def test_mismatched_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\(4, 3\).*\(5, 3\)"):
        linear_moments(torch.ones(4, 3), torch.ones(5, 3))
    with pytest.raises(ValueError, match=r"\(2, 4, 3\)"):
        linear_moments(torch.ones(2, 4, 3), torch.ones(2, 4, 3))
    with pytest.raises(ValueError, match="row_weights"):
        linear_moments(torch.ones(4, 3), torch.ones(4, 3), torch.ones(3))


@pytest.mark.parametrize("mix_alpha", [0.0, 0.3, 1.0])
def test_cross_is_the_moment_of_the_mixed_target(mix_alpha: float):
    cal, exp = pair()
    moments = linear_moments(cal, exp)
    target = mix_alpha * exp + (1 - mix_alpha) * cal
    assert_equal((moments.cross(mix_alpha),), (target.T @ cal / len(cal),), EXACT)
    means = moments.means(mix_alpha, torch.float64)
    assert_equal((means.mean_target,), (target.mean(dim=0),), EXACT)


def test_task_weight_floors_the_norm_at_eps():
    problem: Problem = random_problem(2)
    moments = problem.moments()["task_0"]
    norm = float(second_moment(problem.rows()["task_0"]).square().sum().sqrt())
    assert float(task_weight(moments, 0.0)) == pytest.approx(1 / norm, rel=EXACT)
    assert float(task_weight(moments, 10 * norm)) == pytest.approx(0.1 / norm, rel=EXACT)
    dead = linear_moments(torch.zeros(5, 3), torch.zeros(5, 3))
    assert float(task_weight(dead, 1e-8)) == pytest.approx(1e8)
    with pytest.raises(ZeroDivisionError, match="zero"):
        task_weight(dead, 0.0)


def test_normalised_input_is_a_layer_norm_without_affine():
    cal, _ = pair()
    z = normalised_input(cal, 1e-3)
    for row, found in zip(cal, z, strict=True):
        spread = ((row - row.mean()).square().mean() + 1e-3).sqrt()
        assert_equal((found,), ((row - row.mean()) / spread,), EXACT)
    half = normalised_input(cal.bfloat16(), 1e-3)
    assert half.dtype is torch.float32
    assert_equal((half,), (normalised_input(cal.bfloat16().double(), 1e-3),), FLOAT32_BOUND)


def test_norm_sums_are_those_of_the_definition():
    z = normalised_input(pair()[0], 1e-5)
    p = row_weights(len(z))
    wanted = ((p[:, None] * z).sum(dim=0), (p[:, None] * z * z).sum(dim=0), p.sum())
    assert_equal(values(norm_moments(z, p)), wanted, EXACT)


def test_drift_sums_are_those_of_the_definition():
    cal, exp = pair(rows=24)
    valid = torch.arange(24).reshape(4, 6) % 4 > 0
    found = drift_norm_sum(cal.reshape(4, 6, 5), exp.reshape(4, 6, 5), valid)
    kept = valid.flatten()
    error = (cal - exp)[kept].square().sum(dim=1)
    assert found.rows == int(kept.sum())
    assert found.drift == pytest.approx(float(error.sqrt().sum()), rel=EXACT)
    assert found.drift_sq == pytest.approx(float(error.sum()), rel=EXACT)
    assert found.expert_sq == pytest.approx(float(exp[kept].square().sum()), rel=EXACT)
