"""What the solve of a LayerNorm's gain and shift must satisfy (Eqs. 56-59)."""

import pytest
import torch
from oracle import stacked_norm
from problems import EXACT, assert_close, normal
from torch import Tensor

from fusion_bench_featcal.core import norm_moments, normalised_input, solve_norm

Affine = tuple[Tensor, Tensor]
WIDTH = 7


def random_norms(
    seed: int, tasks: int = 3, rows: int = 30
) -> tuple[dict[str, Tensor], dict[str, Affine], Affine]:
    """Normalised rows and the expert's gain and shift of each task, and an anchor."""
    generator = torch.Generator().manual_seed(seed)

    def affine() -> Affine:
        return 1 + 0.2 * normal(generator, WIDTH), 0.2 * normal(generator, WIDTH)

    inputs, affines = {}, {}
    for index in range(tasks):
        x = normal(generator, WIDTH) + 2.0**index * normal(generator, rows + index, WIDTH)
        inputs[f"task_{index}"] = normalised_input(x, 1e-5)
        affines[f"task_{index}"] = affine()
    return inputs, affines, affine()


@pytest.mark.parametrize("lam", [0.0, 1e-5, 0.05, 3.0])
@pytest.mark.parametrize("has_base", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, EXACT), (torch.float32, 1e-6)])
def test_affine_is_a_least_squares_of_two_unknowns(
    lam: float, has_base: bool, weighted: bool, dtype: torch.dtype, bound: float
):
    inputs, affines, anchor = random_norms(0, rows=200)
    inputs = {task: z.to(dtype) for task, z in inputs.items()}
    generator = torch.Generator().manual_seed(5)
    sums, rows = {}, {}
    for task, z in inputs.items():
        weights = torch.rand(len(z), generator=generator) if weighted else torch.ones(len(z))
        sums[task] = norm_moments(z, weights if weighted else None)
        rows[task] = (z.double(), weights.double() / weights.double().sum())
    pull = anchor if has_base else None
    wanted = stacked_norm(rows, affines, pull, lam)
    found = solve_norm(sums, affines, pull, ridge_lambda=lam, eps=0.0)
    assert_close(found, wanted, bound)


def test_determinant_is_clamped_from_below_by_eps():
    # a channel that is constant over the only task leaves gain and shift undecided
    flat = {"task": norm_moments(torch.full((4, 1), 0.5, dtype=torch.float64))}
    affine = {"task": (torch.tensor([2.0]).double(), torch.tensor([1.0]).double())}
    found = solve_norm(flat, affine, None, ridge_lambda=0.0, eps=1e-6)
    # q = 1/4, zbar = 1/2, so both numerators of Eq. 59 vanish and only the clamp divides them
    assert_close(found, (torch.zeros(1), torch.zeros(1)))
