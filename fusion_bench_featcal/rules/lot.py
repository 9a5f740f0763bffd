"""LOT Merging: least-squares steps from the base."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.rules.merging import MergingRule
from fusion_bench_featcal.rules.norms import NormRows
from fusion_bench_featcal.rules.regmean import LeastSquaresSums
from fusion_bench_featcal.rules.rule import GroupSums, Linear, Solved
from fusion_bench_featcal.setting_fields import setting


@dataclass(frozen=True)
class Lot(MergingRule):
    """LOT Merging (Sun et al., NeurIPS 2025, arXiv 2505.23859), Algorithm 1.

    With task vectors `T_i = W_i - W_0` and Gram matrices `G_i` of expert i's inputs, a linear
    weight is `W_0 + scale (sum_i T_i G_i) (sum_i G_i)^+`. Gains are solved channel by channel, and
    all other parameters are the base plus the scaled mean step. The paper has no smallest energy
    for the pseudo-inverse. Without one, directions of almost no energy get steps of many times the
    weight, so this rule has a cut-off. The paper uses 16 to 64 samples per task.
    """

    scale: float = setting(
        1.2,
        "Factor of every step from the base: the paper's lambda, 1.2 for ViT-B/32 and 1.5 for "
        "ViT-L/14 (6.3).",
        gt=0,
    )
    cutoff: float = setting(
        1e-3,
        "Input directions with less than this share of the largest energy count as unseen; "
        "channels are brought to size 1 before (not in the paper).",
        ge=0,
        le=1,
    )
    calibrate_norm = True

    @property
    def reads_base(self) -> bool:
        """Return True, because steps are relative to the base."""
        return True

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        """Return empty sums relative to the base. Biases and shifts stay as merged."""
        assert base is not None  # a merger has one
        if group.kind == "norm":
            return GainSums(base, merged.bias, self.scale)
        return LeastSquaresSums(base, cutoff=self.cutoff, scale=self.scale, bias=merged.bias)

    def start_scale(self, tasks: int) -> float:
        """Return `scale`."""
        return self.scale


class GainSums:
    """Sums for one norm, in which each channel's gain is weighted by its energy."""

    def __init__(self, base: Linear, shift: Tensor, scale: float) -> None:
        """Start with no expert.

        Args:
            base: The base's parameters. Channels without energy keep its gain.
            shift: Shift of the result.
            scale: Factor of the step from the base.
        """
        self._gain = base.weight.to(solve_dtype(base.weight.device))
        self._shift, self._scale = shift, scale
        self._sums = self._gain.new_zeros(2, len(self._gain))

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        return [self._sums]

    def add(self, task: str, expert: Linear, rows: NormRows, held_out: Any = None) -> None:
        """Add an expert's gain and the mean square of its normalised inputs."""
        energy = (rows.sums[0] / rows.sums[2]).to(self._sums.dtype)
        step = expert.weight.to(self._sums.dtype) - self._gain
        self._sums += torch.stack([energy, energy * step])

    def solve(self) -> Solved:
        """Return the base's gain with the scaled step."""
        energy, right = self._sums
        step = right / energy.where(energy > 0, torch.ones_like(energy))
        return Solved(Linear(self._gain + self._scale * step, self._shift))
