"""RegMean and RegMean++: the weight that reproduces every expert's outputs best."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.least_squares import shrink_off_diagonal, solve_seen
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.rules.merging import MergingRule
from fusion_bench_featcal.rules.rule import GroupSums, Linear, Solved
from fusion_bench_featcal.setting_fields import setting

EPS = 1e-8
"""Smallest norm of a Gram matrix."""


@dataclass(frozen=True)
class RegMean(MergingRule):
    """RegMean (Jin et al., ICLR 2023): `W = (sum_i W_i G_i) (sum_i G_i)^-1`.

    `G_i` is the mean Gram matrix of expert i's inputs, with its off-diagonal entries shrunk.
    Directions without energy keep the experts' mean, as do all other parameters.
    """

    off_diagonal: float = setting(
        0.95, "Factor of the entries of the Gram matrices off the diagonal.", ge=0, le=1
    )
    task_weights: str = setting(
        "equal",
        "`unit_gram` scales Gram matrices to norm 1, as FeatCal does.",
        choices=("equal", "unit_gram"),
    )
    features: str = setting(
        "expert",
        "Features that each expert's block receives: the `expert`'s, or those of the `merged` "
        "blocks before it (RegMean++, Nguyen et al., TMLR 2026).",
        choices=("expert", "merged"),
    )

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        """Return empty sums relative to the experts' mean."""
        return LeastSquaresSums(
            merged, off_diagonal=self.off_diagonal, has_unit_gram=self.task_weights == "unit_gram"
        )


class LeastSquaresSums:
    """Sums for the step from an anchor, `E = (sum_i (W_i - W_a) G_i) (sum_i G_i)^+`."""

    def __init__(
        self,
        anchor: Linear,
        *,
        off_diagonal: float = 1.0,
        has_unit_gram: bool = False,
        cutoff: float = 0.0,
        scale: float = 1.0,
        bias: Tensor | None = None,
    ) -> None:
        """Start with no expert.

        Args:
            anchor: Parameters for directions without energy.
            off_diagonal: Factor of the Gram matrices' entries off the diagonal.
            has_unit_gram: Whether Gram matrices are scaled to norm 1.
            cutoff: Energies up to this share of the largest count as zero.
            scale: Factor of the step.
            bias: Biases of the result, by default those of the anchor.
        """
        self._anchor = anchor.to(solve_dtype(anchor.weight.device))
        self._bias = anchor.bias if bias is None else bias
        self._off_diagonal, self._has_unit_gram = off_diagonal, has_unit_gram
        self._cutoff, self._scale = cutoff, scale
        inputs = anchor.weight.shape[1]
        self._gram = self._anchor.weight.new_zeros(inputs, inputs)
        self._right = torch.zeros_like(self._anchor.weight)
        self._precision = anchor.weight.dtype

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        return [self._gram, self._right]

    def add(self, task: str, expert: Linear, rows: Moments, held_out: Any = None) -> None:
        """Add an expert: the moments of its inputs and its parameters."""
        gram = shrink_off_diagonal(rows.means(centred=False).gram, self._off_diagonal)
        if self._has_unit_gram:
            gram = gram / rows.gram_norm().clamp_min(EPS)
        self._precision, gram = gram.dtype, gram.to(self._gram.dtype)
        self._gram += gram
        self._right += (expert.weight.to(gram.dtype) - self._anchor.weight) @ gram

    def solve(self) -> Solved:
        """Return the anchor's weights with the scaled step."""
        floor = 1 - self._off_diagonal
        step, share = solve_seen(
            self._gram, self._right, precision=self._precision, floor=floor, cutoff=self._cutoff
        )
        weight = self._anchor.weight + self._scale * step
        return Solved(Linear(weight, self._bias), facts={"seen": share})
