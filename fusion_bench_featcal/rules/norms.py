"""Norms, channel by channel: gain and shift (Eqs. 56 to 59), and statistics of BatchNorms."""

from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.rules.rule import Linear, Solved


class NormMoments:
    """Sums over one task's normalised inputs `z` of one norm (Eq. 56).

    Attributes:
        count: Number of rows, a scalar.
        rows: Always None: no rows are kept, unlike in `Moments`.
    """

    def __init__(self, width: int, example: Tensor) -> None:
        """Start with no rows."""
        self._sums, self.rows = [example.new_zeros(width), example.new_zeros(width)], None
        self.count = example.new_zeros((), dtype=solve_dtype(example.device))

    def tensors(self) -> list[Tensor]:
        """Return the sums and the count. Sums of other processes may be added to them in place."""
        return [*self._sums, self.count]

    @property
    def sums(self) -> Tensor:
        """Return `sum z^2`, `sum z` and the number of rows, `[3, d]`."""
        square, total = self._sums
        return torch.stack([square, total, self.count.to(total.dtype).expand_as(total)])

    def add(self, z: Tensor) -> None:
        """Add rows: normalised inputs without gain and shift, `[n, d]`."""
        z = z.to(self._sums[0].dtype)
        torch._foreach_add_(self._sums, [z.square().sum(0), z.sum(0)])
        self.count += len(z)


class StatisticsSums:
    """Statistics of one BatchNorm for a mixture in which all tasks count equally.

    With `m_i` and `s_i` task i's mean and mean square, over N tasks, `mean = sum m_i / N` and
    `variance = sum s_i / N - mean^2`.
    """

    def __init__(self, width: int, example: Tensor) -> None:
        """Start with no task."""
        self._sums = example.new_zeros(3, width, dtype=solve_dtype(example.device))

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        return [self._sums]

    def add(
        self, task: str, expert: Linear | None, rows: NormMoments, held_out: Any = None
    ) -> None:
        """Add a task's mean square and mean."""
        sums = rows.sums.to(self._sums.dtype)
        self._sums += torch.cat([sums[:2] / sums[2], torch.ones_like(sums[:1])])

    def solve(self) -> Solved:
        """Return the variance as `weight` and the mean as `bias`."""
        square, mean = self._sums[:2] / self._sums[2]
        return Solved(Linear((square - mean.square()).clamp_min(0), mean))


class NormSums:
    """Sums over tasks for one norm. All tasks have weight 1."""

    def __init__(self, anchor: Linear, ridge_lambda: float, eps: float) -> None:
        """Start with no task. `eps` is the smallest determinant."""
        self._anchor = anchor.to(solve_dtype(anchor.weight.device))
        self._ridge_lambda, self._eps = ridge_lambda, eps
        self._sums = self._anchor.bias.new_zeros(5, len(anchor.bias))

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        return [self._sums]

    def add(self, task: str, expert: Linear, rows: NormMoments, held_out: Any = None) -> None:
        """Add a task's means of `z^2`, `z`, the expert's outputs, and outputs times `z`."""
        square, mean, count = rows.sums.to(self._sums.dtype)
        square, mean = square / count, mean / count
        gain, shift = expert.to(mean.dtype)
        targets = square * gain + mean * shift, mean * gain + shift
        self._sums += torch.stack([square, mean, *targets, torch.ones_like(mean)])

    def solve(self) -> Solved:
        """Solve two equations for each channel (Eqs. 57 to 59)."""
        square, mean, gain, shift, tasks = self._sums
        pull, anchor = self._ridge_lambda, self._anchor
        square, tasks = square + pull, tasks + pull
        gain, shift = gain + pull * anchor.weight, shift + pull * anchor.bias
        determinant = (square * tasks - mean * mean).clamp_min(self._eps)
        new_gain = (tasks * gain - mean * shift) / determinant
        new_shift = (square * shift - mean * gain) / determinant
        return Solved(Linear(new_gain, new_shift))
