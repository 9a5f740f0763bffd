"""How far an update may move where merged weights stand in for experts' (read budgets)."""

from typing import Any

import pytest
import torch
from oracle import Knobs
from problems import random_problem

from fusion_bench_featcal.core import solve_linear


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("knobs", [Knobs(), Knobs(alpha=0.0, lam=1e-3), Knobs(alpha=1.0, lam=3.0)])
def test_error_bound_of_leaving_out(seed: int, knobs: Knobs):
    """|W' - W| <= sum over what is left out of w_i |C_i|_2 |W_i - W_mer|_F / (lambda + eps)."""
    problem = random_problem(seed, rows=30, width=7)
    moments, merged = problem.moments(), problem.merged[0].double()
    tasks = list(moments)
    left_out = tasks[: 1 + seed % len(tasks)]
    anchor = problem.anchor(knobs.rho)

    def solve(weights: Any) -> Any:
        return solve_linear(
            moments, weights, anchor,
            mix_alpha=knobs.alpha, ridge_lambda=knobs.lam, eps=knobs.eps,
        )  # fmt: skip

    full = solve(problem.weights)
    served = solve({t: merged if t in left_out else w for t, w in problem.weights.items()})
    bound = 0.0
    for task in left_out:
        cross = moments[task].cross(knobs.alpha).double()
        off = torch.linalg.matrix_norm(problem.weights[task].double() - merged)
        spread = torch.linalg.matrix_norm(cross, 2)
        bound += float(full.task_weights[task] * spread * off)
    gap = float(torch.linalg.matrix_norm(served.weight - full.weight))
    assert 0 < gap <= bound / (knobs.lam + knobs.eps)
    assert served.task_weights == full.task_weights  # the grams stay
