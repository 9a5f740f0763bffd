"""LOT Merging: least-squares steps from the base."""

from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.lab.rivals.mergers import Merger
from fusion_bench_featcal.lab.rivals.regmean import LeastSquaresSums
from fusion_bench_featcal.rules.norms import NormMoments
from fusion_bench_featcal.rules.rule import Linear, Solved
from fusion_bench_featcal.settings.fields import setting


class Lot(
    Merger, option="featcal_baselines/lot", source="Sun et al., NeurIPS 2025, arXiv 2505.23859"
):
    """LOT Merging: the task vector that fits all experts best, block by block.

    It is computed by regression on the experts' features. Directions without samples keep the
    base's weights.
    """

    scale: float = setting(
        1.2,
        "Factor by which every step from the base is multiplied: the paper's lambda, 1.2 for "
        "ViT-B/32 and 1.5 for ViT-L/14 (Section 6.3).",
        gt=0,
    )
    # Without a smallest energy of the pseudo-inverse, directions of almost no energy would get
    # steps of many times the weight.
    cutoff: float = setting(
        1e-3,
        "Input directions with less than this share of the largest energy count as unseen. Before "
        "that, channels are scaled to size 1 (not in the paper).",
        ge=0,
        le=1,
    )
    calibrate_norm = True

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> Any:
        """Return empty sums relative to the base (Algorithm 1). Biases and shifts stay as merged.

        With task vectors `T_i` and Gram matrices `G_i` of the experts' inputs, the weight is
        `W_0 + scale (sum_i T_i G_i) (sum_i G_i)^+`. Gains are solved channel by channel.
        """
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
        """Start with no expert. `shift` is the result's, `scale` the factor of the step."""
        self._gain = base.weight.to(solve_dtype(base.weight.device))
        self._shift, self._scale = shift, scale
        self._sums = self._gain.new_zeros(2, len(self._gain))

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        return [self._sums]

    def add(self, task: str, expert: Linear, rows: NormMoments) -> None:
        """Add an expert's gain and the mean square of its normalised inputs."""
        energy = (rows.sums[0] / rows.sums[2]).to(self._sums.dtype)
        step = expert.weight.to(self._sums.dtype) - self._gain
        self._sums += torch.stack([energy, energy * step])

    def solve(self) -> Solved:
        """Return the base's gain with the scaled step. Channels without energy keep it."""
        energy, right = self._sums
        step = right / energy.where(energy > 0, torch.ones_like(energy))
        return Solved(Linear(self._gain + self._scale * step, self._shift))
