"""FeatCal as published."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.solve import SINGLE_RIDGE, solve_dtype, solve_ridge
from fusion_bench_featcal.errors.words import option, user_term
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.rules.norms import NormSums
from fusion_bench_featcal.rules.rule import EPS, GroupSums, Linear, Rule, Solved, check_number
from fusion_bench_featcal.rules.targets import Targets, anchor_of

MAX_ROUNDING = 1e-3
"""Largest accepted float32 rounding of the normal equations, relative to lambda."""


@dataclass(frozen=True)
class Paper(Rule):
    """FeatCal as published: all modules of a block in one turn, one ridge, a mixed target.

    Attributes:
        ridge_lambda: Ridge strength lambda, relative to Gram matrices of norm 1 (Eq. 15).
        mix_alpha: Share alpha of the expert's input in the target's input (Eq. 10).
        anchor_rho: rho of the anchor `rho W_mer + (1 - rho) W_base` (Eq. 11).
        calibrate_bias: Whether biases of linear modules change (Eqs. 51 to 55).
        calibrate_norm: Whether gains and shifts of norms change (Eqs. 56 to 59).
    """

    ridge_lambda: float = 0.05
    mix_alpha: float = 0.3
    anchor_rho: float = 2.0
    calibrate_bias: bool = True
    calibrate_norm: bool = True

    def __post_init__(self) -> None:
        check_number("ridge_lambda", self.ridge_lambda, 0)
        check_number("mix_alpha", self.mix_alpha, 0, 1)
        check_number("anchor_rho", self.anchor_rho, -math.inf)

    @property
    def reads_base(self) -> bool:
        """Return whether the anchor uses the base model."""
        return self.anchor_rho != 1

    @property
    def needs_base(self) -> bool:
        """Return whether the anchor uses the base model, without which it cannot be built."""
        return self.reads_base

    @property
    def remedy(self) -> str:
        """Return advice for a system without a solution."""
        ridge = f"{option('ridge_lambda')} (now {self.ridge_lambda})"
        return f"Raise {ridge} or {option('samples_per_task')}"

    def dtype_warning(self, features: torch.dtype) -> str | None:
        """Return a warning if a small lambda amplifies the rounding of bfloat16 features."""
        if self.ridge_lambda >= SINGLE_RIDGE or features != torch.bfloat16:
            return None
        return (
            f"{option('ridge_lambda', f'{self.ridge_lambda:g}')} is small for bfloat16 features: "
            "at 1e-5 their rounding changes updates by 1 to 7 %, and by more with few samples. "
            f"Raise it to {SINGLE_RIDGE:g} or more, or use float32: {user_term('float32')}"
        )

    def sums(self, group: Group, merged: Linear, base: Linear | None) -> GroupSums:
        """Return empty sums relative to the anchor."""
        anchor = anchor_of(merged, base, self.anchor_rho)
        if group.kind == "norm":
            return NormSums(anchor, self.ridge_lambda, EPS)
        return PaperSums(self, group, anchor)

    def dtype(self, tasks: int, device: torch.device) -> torch.dtype:
        """Return float64 if a small lambda amplifies float32 rounding too much for the update."""
        rounding = torch.finfo(torch.float32).eps * tasks
        is_small = self.ridge_lambda < max(SINGLE_RIDGE, rounding / MAX_ROUNDING)
        return solve_dtype(device) if is_small else torch.float32


class PaperSums:
    """Sums for the step from the anchor (Eqs. 13 to 17, 51 to 55)."""

    def __init__(self, rule: Paper, group: Group, anchor: Linear) -> None:
        """Start with no task."""
        self._rule, self._dtype = rule, group.dtype
        self._targets = Targets(group, anchor, rule.mix_alpha)

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        return self._targets.tensors()

    def add(self, task: str, expert: Linear, rows: Moments, held_out: Any = None) -> None:
        """Add a task's means, with weight `1 / |G_i|` (Eq. 14)."""
        self._targets.add(rows, expert, rows.row_weight(EPS))

    def solve(self) -> Solved:
        """Solve for the step from the anchor (Eq. 17). The bias follows from the means."""
        rule, sums = self._rule, self._targets.finalize()
        right = sums.cross.sub_(self._targets.anchor.weight, alpha=EPS)
        rounding = max(rounding_of(self._dtype), torch.finfo(right.dtype).eps)
        ridge = rule.ridge_lambda + EPS
        step, residual = solve_ridge(sums.gram, right, ridge, rounding=rounding)
        return Solved(self._targets.moved(step, pull=rule.ridge_lambda), residual)


def rounding_of(features: torch.dtype) -> float:
    """Return the rounding error of features in a Gram matrix, relative to its diagonal.

    Float32 features add the square of their rounding to directions that they lack, and float64 sums
    resolve it. Half-precision features count as exact.
    """
    return 0.0 if features.itemsize < 4 else torch.finfo(features).eps ** 2
