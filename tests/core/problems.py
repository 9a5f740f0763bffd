"""Random calibration problems of linear modules that share their input."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from oracle import Knobs, Rows, solve_linear
from torch import Tensor

from fusion_bench_featcal.core import LinearMoments, extrapolate_anchor, linear_moments
from fusion_bench_featcal.core import solve_bias as bias_of
from fusion_bench_featcal.core import solve_linear as weight_of

EXACT = 1e-9
FLOAT32_BOUND = 2e-6
"""Relative error of solutions and sums of float32 rows."""

GRID = [
    Knobs(alpha=0.3, lam=0.05, rho=2.0),
    Knobs(alpha=0.0, lam=1e-3, rho=0.5),
    Knobs(alpha=1.0, lam=3.0, rho=1.0),
    Knobs(alpha=0.6, lam=1e-5, rho=-0.7),
    Knobs(alpha=0.15, lam=0.0, rho=2.2),
    Knobs(alpha=0.25, lam=0.05, rho=2.2, eps=1e-2),
]


@dataclass(frozen=True)
class Problem:
    """Inputs of both sides and the parameters of every model, for one linear module."""

    x_cal: dict[str, Tensor]
    x_exp: dict[str, Tensor]
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    merged: tuple[Tensor, Tensor]
    base: tuple[Tensor, Tensor]

    def cast(self, dtype: torch.dtype) -> "Problem":
        """The same numbers, rounded to `dtype`."""

        def rounded(value: Any) -> Any:
            if isinstance(value, dict):
                return {task: tensor.to(dtype) for task, tensor in value.items()}
            return tuple(tensor.to(dtype) for tensor in value)

        return Problem(**{name: rounded(value) for name, value in vars(self).items()})

    def without(self, direction: Tensor) -> "Problem":
        """The same models on inputs that never point in one direction."""
        tables = {
            name: {task: x - (x @ direction)[:, None] * direction for task, x in table.items()}
            for name, table in (("x_cal", self.x_cal), ("x_exp", self.x_exp))
        }
        return replace(self, **tables)

    def moments(self) -> dict[str, LinearMoments]:
        return {task: linear_moments(x, self.x_exp[task]) for task, x in self.x_cal.items()}

    def anchor(self, rho: float, index: int = 0) -> Tensor:
        return extrapolate_anchor(self.merged[index], self.base[index], rho)

    def truth(self, knobs: Knobs, *, has_base: bool = True) -> tuple[Tensor, Tensor]:
        """Weight and bias from the oracle's stacked systems, in float64."""
        rows = {
            task: Rows(cal=x.double(), exp=self.x_exp[task].double(), p=equal_shares(len(x)))
            for task, x in self.x_cal.items()
        }
        weights, biases = (
            {task: value.double() for task, value in table.items()}
            for table in (self.weights, self.biases)
        )
        anchors = [
            knobs.rho * merged.double() + (1 - knobs.rho) * base.double()
            for merged, base in zip(self.merged, self.base, strict=True)
        ]
        pair = anchors[0], anchors[1] if has_base else None
        weight, bias = solve_linear(rows, weights, biases, pair, knobs)
        assert bias is not None
        return weight, bias


def equal_shares(rows: int) -> Tensor:
    return torch.full((rows,), 1 / rows, dtype=torch.float64)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_problem(
    seed: int, *, tasks: int = 3, rows: int = 40, width: int = 6, outputs: int = 4
) -> Problem:
    """Float64 problem: tasks of different scale and mean, experts scattered about one base."""
    generator = torch.Generator().manual_seed(seed)
    base = (normal(generator, outputs, width), normal(generator, outputs))
    x_exp, x_cal, weights, biases = {}, {}, {}, {}
    for index in range(tasks):
        task, scale = f"task_{index}", 3.0 ** (index - 1)
        mean = normal(generator, width)
        x_exp[task] = scale * (normal(generator, rows + index, width) + mean)
        x_cal[task] = x_exp[task] + 0.3 * scale * normal(generator, rows + index, width)
        weights[task] = base[0] + 0.3 * normal(generator, outputs, width)
        biases[task] = base[1] + 0.3 * normal(generator, outputs)
    merged = (
        base[0] + 0.4 * sum(weight - base[0] for weight in weights.values()),
        base[1] + 0.4 * sum(bias - base[1] for bias in biases.values()),
    )
    return Problem(x_cal, x_exp, weights, biases, merged, base)


def solve_weight(problem: Problem, knobs: Knobs) -> Any:
    return weight_of(
        problem.moments(),
        problem.weights,
        problem.anchor(knobs.rho),
        mix_alpha=knobs.alpha,
        ridge_lambda=knobs.lam,
        eps=knobs.eps,
    )


def solve_both(problem: Problem, knobs: Knobs, *, has_base: bool = True) -> tuple[Tensor, Tensor]:
    """Weight and bias as the package solves them; without a base, lambda does not pull the bias."""
    moments, solution = problem.moments(), solve_weight(problem, knobs)
    bias = bias_of(
        moments,
        problem.weights,
        problem.biases,
        solution.weight,
        solution.task_weights,
        problem.anchor(knobs.rho, 1) if has_base else None,
        mix_alpha=knobs.alpha,
        ridge_lambda=knobs.lam,
    )
    return solution.weight, bias


def assert_close(
    found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], bound: float = EXACT
) -> None:
    """Compare tensors by their relative distance, or the absolute one to zero."""
    for ours, theirs in zip(found, wanted, strict=True):
        ours, theirs = ours.double(), theirs.double()
        distance = float((ours - theirs).norm()) / (float(theirs.norm()) or 1.0)
        assert distance <= bound, f"relative distance {distance:.2e} exceeds {bound:.0e}"
