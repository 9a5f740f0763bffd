"""Random calibration problems of one module, and the properties a solution of them must have.

The properties are functions that raise AssertionError, so that the negative controls can show
that each of them does notice a mistake.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from oracle import Knobs, Rows, second_moment, stacked_bias, stacked_weight
from torch import Tensor

from fusion_bench_featcal.core import (
    LinearMoments,
    LinearSolution,
    extrapolate_anchor,
    linear_moments,
    solve_bias,
    solve_linear,
)

EXACT = 1e-9
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
    row_weights: dict[str, Tensor] = field(default_factory=dict)

    def cast(self, dtype: torch.dtype) -> "Problem":
        """The same numbers, rounded to `dtype`."""
        tables = ("x_cal", "x_exp", "weights", "biases", "row_weights")
        changed: dict = {
            name: {task: value.to(dtype) for task, value in getattr(self, name).items()}
            for name in tables
        }
        for name in ("merged", "base"):
            changed[name] = tuple(value.to(dtype) for value in getattr(self, name))
        return Problem(**changed)

    def with_inputs(self, change: Callable[[str, Tensor], Tensor]) -> "Problem":
        """The same models on changed inputs; `change(task, x)` sees both sides."""
        return replace(
            self,
            x_cal={task: change(task, x) for task, x in self.x_cal.items()},
            x_exp={task: change(task, x) for task, x in self.x_exp.items()},
        )

    def rows(self) -> dict[str, Rows]:
        """What the oracle works on: counted rows in float64, weights of sum one."""
        out = {}
        for task, x in self.x_cal.items():
            p = self.row_weights.get(task, x.new_ones(len(x))).double()
            exp = self.x_exp[task].double()
            out[task] = Rows(cal=x.double()[p > 0], exp=exp[p > 0], p=p[p > 0] / p.sum())
        return out

    def moments(self) -> dict[str, LinearMoments]:
        return {
            task: linear_moments(x, self.x_exp[task], self.row_weights.get(task))
            for task, x in self.x_cal.items()
        }

    def anchor(self, rho: float, index: int = 0) -> Tensor:
        return extrapolate_anchor(self.merged[index], self.base[index], rho)

    def truth(self, knobs: Knobs) -> tuple[Tensor, Tensor]:
        """Weight and bias from the oracle's stacked systems, in float64."""
        rows = self.rows()
        task_weights = {
            task: 1 / second_moment(r).square().sum().sqrt() for task, r in rows.items()
        }
        weights = {task: value.double() for task, value in self.weights.items()}
        anchors = [
            knobs.rho * merged.double() + (1 - knobs.rho) * base.double()
            for merged, base in zip(self.merged, self.base, strict=True)
        ]
        new = stacked_weight(rows, weights, anchors[0], task_weights, knobs)
        errors = {
            task: self.biases[task].double()
            + r.target(knobs.alpha) @ weights[task].T
            - r.cal @ new.T
            for task, r in rows.items()
        }
        return new, stacked_bias(rows, errors, anchors[1], task_weights, knobs.lam)


def random_problem(
    seed: int,
    *,
    tasks: int = 3,
    rows: int = 40,
    width: int = 6,
    outputs: int = 4,
    drift: float = 0.3,
) -> Problem:
    """Float64 problem: tasks of different scale and mean, experts scattered about one base."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    names = [f"task_{index}" for index in range(tasks)]
    base = (normal(outputs, width), normal(outputs))
    x_exp, x_cal, weights, biases = {}, {}, {}, {}
    for index, task in enumerate(names):
        x = (normal(rows + index, width) + normal(width)) * 3.0 ** (index - 1)
        x_exp[task] = x
        x_cal[task] = x + drift * 3.0 ** (index - 1) * normal(*x.shape)
        weights[task] = base[0] + 0.3 * normal(outputs, width)
        biases[task] = base[1] + 0.3 * normal(outputs)
    merged = (
        base[0] + 0.4 * sum(weight - base[0] for weight in weights.values()),
        base[1] + 0.4 * sum(bias - base[1] for bias in biases.values()),
    )
    return Problem(x_cal, x_exp, weights, biases, merged, base)


def solve_weight(
    problem: Problem, knobs: Knobs, moments: Mapping[str, LinearMoments] | None = None
) -> LinearSolution:
    return solve_linear(
        problem.moments() if moments is None else moments,
        problem.weights,
        problem.anchor(knobs.rho),
        mix_alpha=knobs.alpha,
        ridge_lambda=knobs.lam,
        eps=knobs.eps,
    )


def solve_both(
    problem: Problem, knobs: Knobs, moments: Mapping[str, LinearMoments] | None = None
) -> tuple[Tensor, Tensor]:
    """Weight and bias as the package solves them."""
    moments = problem.moments() if moments is None else moments
    solution = solve_weight(problem, knobs, moments)
    bias = solve_bias(
        moments,
        problem.weights,
        problem.biases,
        solution.weight,
        solution.task_weights,
        problem.anchor(knobs.rho, 1),
        mix_alpha=knobs.alpha,
        ridge_lambda=knobs.lam,
    )
    return solution.weight, bias


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative distance; absolute where the wanted value is zero."""
    scale = float(wanted.double().norm())
    return float((found.double() - wanted.double()).norm()) / (scale or 1.0)


def assert_equal(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], bound: float) -> None:
    worst = max(distance(a, b) for a, b in zip(found, wanted, strict=True))
    assert worst <= bound, f"relative distance {worst:.2e} exceeds {bound:.0e}"


def assert_least_squares(
    problem: Problem, found: tuple[Tensor, Tensor], knobs: Knobs, bound: float
) -> None:
    """Weight and bias are those of the stacked system."""
    assert_equal(found, problem.truth(knobs), bound)
