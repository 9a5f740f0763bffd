"""Gain and shift of norms, channel by channel (Eqs. 56 to 59)."""

import torch
from torch import Tensor

from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.rules.rule import Linear, Solved


class NormRows:
    """Sums over one task's normalised inputs `z` of one norm (Eq. 56).

    Attributes:
        sums: `sum z^2`, `sum z` and the number of rows, `[3, d]`.
    """

    def __init__(self, width: int, like: Tensor) -> None:
        """Start with no rows."""
        self.sums = like.new_zeros(3, width)

    def tensors(self) -> list[Tensor]:
        """Return the sums. Sums of other processes may be added to them in place."""
        return [self.sums]

    def add(self, z: Tensor, weights: Tensor | None) -> None:
        """Add rows.

        Args:
            z: Normalised inputs without gain and shift, `[n, d]`.
            weights: Weight of each row, `[n]`. With None all weigh 1.
        """
        z = z.to(self.sums.dtype)
        weights = z.new_ones(len(z)) if weights is None else weights.to(z.dtype)
        self.sums[0] += weights @ z.square()
        self.sums[1] += weights @ z
        self.sums[2] += weights.sum()


class NormSums:
    """Sums over tasks for one norm. All tasks have weight 1."""

    def __init__(self, anchor: Linear, ridge_lambda: float, eps: float) -> None:
        """Start with no task. `eps` is the smallest determinant."""
        self._anchor = anchor.to(solve_dtype(anchor.weight.device))
        self._ridge_lambda, self._eps = ridge_lambda, eps
        self._sums = self._anchor.bias.new_zeros(5, anchor.bias.shape[-1])

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        return [self._sums]

    def add(self, task: str, rows: NormRows, expert: Linear) -> dict[str, Tensor]:
        """Add a task's means of `z^2`, `z`, the expert's outputs, and outputs times `z`."""
        square, mean, count = rows.sums.to(self._sums.dtype)
        square, mean = square / count, mean / count
        gain, shift = expert.weight[0, 0].to(mean.dtype), expert.bias[0].to(mean.dtype)
        targets = square * gain + mean * shift, mean * gain + shift
        self._sums += torch.stack([square, mean, *targets, torch.ones_like(mean)])
        return {}

    def solve(self) -> Solved:
        """Solve two equations for each channel (Eqs. 57 to 59)."""
        square, mean, gain, shift, tasks = self._sums
        pull, anchor = self._ridge_lambda, self._anchor
        square, tasks = square + pull, tasks + pull
        gain, shift = gain + pull * anchor.weight[0, 0], shift + pull * anchor.bias[0]
        determinant = (square * tasks - mean * mean).clamp_min(self._eps)
        new_gain = (tasks * gain - mean * shift) / determinant
        new_shift = (square * shift - mean * gain) / determinant
        return Solved(Linear(new_gain[None, None], new_shift[None]))
