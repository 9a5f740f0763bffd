"""Rules of the ablation study, each without one component."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.rules.paper import Paper, PaperSums
from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.rules.rule import Linear, Solved


@dataclass(frozen=True)
class EqualWeights(Paper):
    """The paper's rule with unscaled Gram matrices.

    Lambda is relative to the mean of their norms, as it is relative to norm 1 with `1 / |G|`.
    """

    def linear_sums(self, group: Any, anchor: Linear) -> PaperSums:
        """Return empty sums for linear modules."""
        return _EqualSums(self, group, anchor)


@dataclass(frozen=True)
class AllAtOnce(Plus):
    """FeatCal+ with all modules of a block solved in one turn."""

    def turns(self, groups: Sequence[Any]) -> list[Sequence[Any]]:
        """Solve all modules in one turn, as the paper does."""
        return Paper().turns(groups)


class _EqualSums(PaperSums):
    """Sums in which every task has weight 1, divided at the end by the mean Gram norm."""

    def __init__(self, rule: Paper, group: Any, anchor: Linear) -> None:
        super().__init__(rule, group, anchor)
        self._norms = anchor.weight.new_zeros(2, len(anchor.weight))  # sum over tasks, their number

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        return [*super().tensors(), self._norms]

    def weights_of(self, rows: Moments) -> Tensor:
        """Return 1 for each map."""
        norms = rows.gram_norms()
        self._norms += torch.stack([norms, torch.ones_like(norms)])
        return torch.ones_like(norms)

    def solve(self) -> Solved:
        """Solve as published, relative to the mean norm."""
        scale = self._norms[1] / self._norms[0]
        for sums in super().tensors():
            sums.mul_(scale.to(sums.dtype).view(-1, *[1] * (sums.ndim - 2)))
        return super().solve()
