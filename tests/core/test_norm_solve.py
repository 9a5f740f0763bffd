"""What the solve of a LayerNorm's gain and shift must satisfy (Eqs. 56-59)."""

from collections.abc import Mapping

import pytest
import torch
from problems import EXACT, assert_equal
from torch import Tensor

from fusion_bench_featcal.core import (
    NormMoments,
    norm_moments,
    normalised_input,
    solve_norm,
)

Affine = tuple[Tensor, Tensor]
FLOAT32_BOUND = 1e-6
WIDTH = 7


def random_norms(
    seed: int, tasks: int = 3, rows: int = 30
) -> tuple[dict[str, Tensor], dict[str, Affine], Affine]:
    """Normalised rows and the expert's gain and shift of each task, and an anchor."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    centre = normal(WIDTH)
    inputs, affines = {}, {}
    for index in range(tasks):
        x = centre + normal(WIDTH) + 2.0**index * normal(rows + index, WIDTH)
        inputs[f"task_{index}"] = normalised_input(x, 1e-5)
        affines[f"task_{index}"] = (1 + 0.2 * normal(WIDTH), 0.2 * normal(WIDTH))
    return inputs, affines, (1 + 0.2 * normal(WIDTH), 0.2 * normal(WIDTH))


def sums(inputs: Mapping[str, Tensor], weights: Mapping | None = None) -> dict[str, NormMoments]:
    return {t: norm_moments(z, None if weights is None else weights[t]) for t, z in inputs.items()}


def channel_by_channel(
    inputs: Mapping[str, Tensor],
    affines: Mapping[str, Affine],
    anchor: Affine | None,
    lam: float,
    weights: Mapping[str, Tensor] | None = None,
) -> Affine:
    """Two unknowns a channel, all tasks alike, by a stacked least-squares system."""
    solutions = []
    for channel in range(WIDTH):
        left, right = [], []
        for task, z in inputs.items():
            p = torch.ones(len(z)).double() if weights is None else weights[task]
            scale = (p / p.sum()).sqrt()
            feature = z[:, channel].double()
            gain, shift = (part[channel] for part in affines[task])
            left.append(torch.stack([scale * feature, scale], dim=1))
            right.append(scale * (gain * feature + shift))
        if anchor is not None:
            left.append(lam**0.5 * torch.eye(2).double())
            right.append(lam**0.5 * torch.stack([part[channel] for part in anchor]))
        system, wanted = torch.cat(left), torch.cat(right)[:, None]
        solutions.append(torch.linalg.lstsq(system, wanted).solution[:, 0])
    gain, shift = torch.stack(solutions).T
    return gain, shift


@pytest.mark.parametrize("lam", [0.0, 1e-5, 0.05, 3.0])
@pytest.mark.parametrize("has_base", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_affine_is_a_least_squares_of_two_unknowns(lam: float, has_base: bool, weighted: bool):
    inputs, affines, anchor = random_norms(0)
    generator = torch.Generator().manual_seed(5)
    weights = {t: torch.rand(len(z), generator=generator).double() for t, z in inputs.items()}
    used = weights if weighted else None
    pull = anchor if has_base else None
    found = solve_norm(sums(inputs, used), affines, pull, ridge_lambda=lam, eps=0.0)
    assert_equal(found, channel_by_channel(inputs, affines, pull, lam, used), EXACT)


def test_float32_sums_stay_within_their_bound():
    inputs, affines, anchor = random_norms(1, rows=500)
    narrow = {task: z.float() for task, z in inputs.items()}
    found = solve_norm(sums(narrow), affines, anchor, ridge_lambda=0.05, eps=1e-8)
    assert_equal(found, channel_by_channel(narrow, affines, anchor, 0.05), FLOAT32_BOUND)


def test_determinant_is_clamped_from_below_by_eps():
    # a channel that is constant over the only task leaves gain and shift undecided
    flat = {"task": torch.full((4, 1), 0.5, dtype=torch.float64)}
    affine = {"task": (torch.tensor([2.0]).double(), torch.tensor([1.0]).double())}
    gain, shift = solve_norm(sums(flat), affine, None, ridge_lambda=0.0, eps=1e-6)
    assert torch.isfinite(gain).all()
    assert torch.isfinite(shift).all()
    # q = 1/4, zbar = 1/2, so both numerators of Eq. 59 vanish and only the clamp divides them
    assert_equal((gain, shift), (torch.zeros(1), torch.zeros(1)), EXACT)
