import pytest
import torch
from feature_problems import normal

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.rivals import RidgeSurgery
from fusion_bench_featcal.lab.rivals.ridge_surgery import GRID


def fit(merged, expert, strength):
    return RidgeSurgery(ridge_lambda=strength).fit(merged, expert, "a")


def problem(samples=40, width=6):
    merged = normal(0, samples, width).double() + 2
    matrix = torch.eye(width) + 0.3 * normal(1, width, width)
    return merged, merged @ matrix.double().T + normal(2, width).double()


def test_a_large_ridge_leaves_the_mean_drift():
    merged, expert = problem()
    corrected = fit(merged, expert, 1e12)(merged)
    torch.testing.assert_close(corrected, merged + (expert - merged).mean(dim=0))


def test_solution_is_where_the_objective_is_flat():
    merged, expert = problem()
    expert = expert + normal(5, *expert.shape)
    module = fit(merged, expert, 0.2)
    matrix = module.matrix.clone().requires_grad_()
    shift = module.shift.clone().requires_grad_()
    residual = merged - expert - (merged @ matrix.T + shift)
    variance = (merged - merged.mean(dim=0)).square().mean()
    ridge = 0.2 * len(merged) * variance * matrix.square().sum()
    for gradient in torch.autograd.grad(residual.square().sum() + ridge, (matrix, shift)):
        assert gradient.abs().max() < 1e-9


def test_scaling_all_features_scales_the_correction():
    merged, expert = problem()
    expert = expert + normal(5, *expert.shape)
    small, large = fit(merged, expert, 0.2), fit(100 * merged, 100 * expert, 0.2)
    torch.testing.assert_close(large(100 * merged), 100 * small(merged))


def test_auto_takes_the_least_error_of_refits_without_each_sample():
    merged, expert = problem(samples=12)
    expert = expert + normal(5, *expert.shape)
    variance = (merged - merged.mean(dim=0)).square().mean()
    errors = []
    for strength in GRID:
        error = 0.0
        for left_out in range(12):
            kept = [row for row in range(12) if row != left_out]
            part = merged[kept]
            # the ridge's absolute strength is that of the full fit
            own = (part - part.mean(dim=0)).square().mean()
            relative = strength * float(12 * variance / (11 * own))
            module = fit(part, expert[kept], relative)
            error += (module(merged[left_out]) - expert[left_out]).square().sum().item()
        errors.append(error)
    best = GRID[errors.index(min(errors))]
    assert 0 < GRID.index(best) < len(GRID) - 1
    assert torch.equal(fit(merged, expert, "auto").matrix, fit(merged, expert, best).matrix)


@pytest.mark.parametrize("strength", [0, 0.1])
def test_fewer_samples_than_dimensions_stay_finite(strength):
    merged, expert = problem(samples=4, width=10)
    corrected = fit(merged, expert, strength)(merged)
    assert corrected.isfinite().all()
    if strength == 0:
        torch.testing.assert_close(corrected, expert)


def test_one_sample_is_shifted_and_auto_asks_for_two():
    merged, expert = problem(samples=1)
    torch.testing.assert_close(fit(merged, expert, 0.1)(merged), expert)
    with pytest.raises(CalibrationError, match=r"task 'a' has 1 sample.*method\.samples_per_task"):
        fit(merged, expert, "auto")


def test_features_that_do_not_vary_are_refused():
    merged, expert = torch.ones(5, 4), normal(0, 5, 4)
    with pytest.raises(CalibrationError, match=r"task 'a'.*do not vary over 5 samples"):
        fit(merged, expert, 0.1)


def test_keeps_the_dtype_of_the_features():
    merged, expert = problem()
    module = fit(merged.float(), expert.float(), 0.1)
    assert module.matrix.dtype == module.shift.dtype == torch.float32
    assert not module.matrix.requires_grad
