"""The anchor of FeatCal+, from sums of rows and from the rows themselves."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fusion_bench_featcal.core.kfold import InputSums, Means, TargetSums, anchor

WIDTH, OUTPUTS, ROWS = 6, 4, 50


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def lacking(
    steps: Sequence[Tensor],
    step: Tensor,
    inputs: Sequence[Tensor],
    shifts: Sequence[Tensor] | None = None,
) -> tuple[Tensor, float]:
    """The anchor at rho = 1.5 for experts' steps, each with its own task's inputs `[n, d]`.

    It is the missing step once.
    """
    biased = shifts is not None
    shifts = shifts or [torch.zeros(len(step), dtype=torch.float64)] * len(steps)
    u = [x @ (s - step).T + b for s, x, b in zip(steps, inputs, shifts, strict=True)]
    x, rows = torch.cat(list(inputs)), torch.cat(u)
    count = torch.tensor(float(len(x)), dtype=torch.float64)
    means = Means(InputSums(gram=x.T @ x, x=x.sum(0), weight=count), biased=biased)
    own = TargetSums(moment=rows.T @ x, u=rows.sum(0))
    missing, share = anchor(means, own, rows.square().sum(), step, len(steps), 1.5)
    return missing, float(share)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scale", [0.3, 1.0, 1.7])
def test_equal_experts_lack_what_the_merged_step_is_short_of(scale: float, biased: bool):
    step, x = normal(OUTPUTS, WIDTH, seed=1), normal(ROWS, WIDTH, seed=2) + 3
    shifts = [normal(OUTPUTS, seed=3)] * 4 if biased else None
    missing, share = lacking([step] * 4, scale * step, [x] * 4, shifts)
    torch.testing.assert_close(missing, (1 - scale) * step)
    assert share == pytest.approx(scale)


def test_tasks_with_inputs_of_their_own_lack_the_rest_of_the_sum():
    steps, inputs = [], []
    for task in range(3):  # each task's inputs lie in two directions of their own
        mask = torch.zeros(WIDTH, dtype=torch.float64)
        mask[2 * task : 2 * task + 2] = 1
        steps.append(normal(OUTPUTS, WIDTH, seed=task) * mask)
        inputs.append(normal(ROWS, WIDTH, seed=10 + task) * mask)
    total = steps[0] + steps[1] + steps[2]
    missing, share = lacking(steps, total / 3, inputs)
    torch.testing.assert_close(missing, total * 2 / 3)
    assert share == pytest.approx(1 / 3)


def test_the_share_is_what_the_rows_say():
    common = normal(OUTPUTS, WIDTH, seed=9)
    steps = [common + 0.5 * normal(OUTPUTS, WIDTH, seed=task) for task in range(2)]
    inputs = [normal(ROWS, WIDTH, seed=10 + task) + task for task in range(2)]
    shifts = [normal(OUTPUTS, seed=20 + task) for task in range(2)]
    step = 0.4 * steps[0] + 0.6 * steps[1]
    pairs = zip(steps, inputs, shifts, strict=True)
    wanted = torch.cat([x @ s.T + b for s, x, b in pairs])
    given = torch.cat(inputs) @ step.T
    wanted, given = wanted - wanted.mean(0), given - given.mean(0)
    expected = float((wanted * given).sum() / wanted.square().sum())
    missing, share = lacking(steps, step, inputs, shifts)
    assert share == pytest.approx(expected)
    torch.testing.assert_close(missing, step * (1 / expected - 1))


def test_a_step_that_hardly_helps_is_lengthened_within_bounds():
    step, x = normal(OUTPUTS, WIDTH, seed=1), torch.eye(WIDTH, dtype=torch.float64)
    other = normal(OUTPUTS, WIDTH, seed=2)
    other -= step * (other * step).sum() / step.square().sum()
    missing, share = lacking([1e-3 * step + other] * 4, step, [x] * 4)
    assert 0 < share < 0.01
    torch.testing.assert_close(missing, 3 * step)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_step_that_leads_elsewhere_is_not_lengthened(scale: float):
    step, x = normal(OUTPUTS, WIDTH, seed=1), normal(ROWS, WIDTH, seed=2)
    missing, share = lacking([scale * step] * 2, step, [x] * 2)
    assert share <= 0 and torch.equal(missing, torch.zeros_like(missing))
