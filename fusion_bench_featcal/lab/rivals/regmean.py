"""RegMean and RegMean++: weights that reproduce every expert's outputs best."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.solve import solve_dtype, solve_ridge
from fusion_bench_featcal.lab.rivals.mergers import Merger
from fusion_bench_featcal.rules.rule import EPS, Linear, Solved
from fusion_bench_featcal.settings.fields import setting


class RegMean(Merger, option="featcal_baselines/regmean", source="Jin et al., ICLR 2023"):
    """RegMean: linear weights by regression on the experts' features.

    All other parameters are the experts' mean. Same solution as regmean/clip_regmean, for any model
    family.
    """

    off_diagonal: float = setting(
        0.95,
        "Factor by which off-diagonal entries of the Gram matrices are multiplied.",
        ge=0,
        le=1,
    )
    task_weights: str = setting(
        "equal",
        "Weights of the tasks: `equal`, or `unit_gram`, which scales Gram matrices to norm 1, as "
        "FeatCal does.",
        choices=("equal", "unit_gram"),
    )

    @property
    def reads_base(self) -> bool:
        """Return False, because steps are relative to the experts' mean."""
        return False

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> Any:
        """Return empty sums: `W = (sum_i W_i G_i) (sum_i G_i)^-1` with Gram matrices `G_i`."""
        is_unit = self.task_weights == "unit_gram"
        return LeastSquaresSums(merged, off_diagonal=self.off_diagonal, has_unit_gram=is_unit)


class RegMeanPlusPlus(
    RegMean, option="featcal_baselines/regmean_plusplus", source="Nguyen et al., TMLR 2026"
):
    """RegMean++: RegMean block by block, on features of the blocks merged so far.

    Parameters after the last block are the experts' mean, in regmean_plusplus/* the base's.
    """

    features = "merged"


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
            bias: Biases of the result, by default the anchor's.
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

    def add(self, task: str, expert: Linear, rows: Moments) -> None:
        """Add an expert: the moments of its inputs and its parameters."""
        means = rows.means(centred=False).gram
        gram = means * self._off_diagonal
        gram.diagonal().copy_(means.diagonal())
        if self._has_unit_gram:
            gram = gram / rows.gram_norm().clamp_min(EPS)
        self._precision, gram = gram.dtype, gram.to(self._gram.dtype)
        self._gram += gram
        self._right += (expert.weight.to(gram.dtype) - self._anchor.weight) @ gram

    def solve(self) -> Solved:
        """Return the anchor's weights with the scaled step."""
        options = {"precision": self._precision, "cutoff": self._cutoff}
        floor = 1 - self._off_diagonal
        step = shortest_solution(self._gram, self._right, floor=floor, **options)
        return Solved(Linear(self._anchor.weight + self._scale * step, self._bias))


def shortest_solution(
    gram: Float[Tensor, "d d"],
    right: Float[Tensor, "m d"],
    *,
    precision: torch.dtype,
    floor: float = 0.0,
    cutoff: float = 0.0,
) -> Float[Tensor, "m d"]:
    """Return the minimum-norm solution of `E G = R`, which is zero in directions without energy.

    Channels may differ in size by orders of magnitude, and their rounding errors differ as much.
    Energies are therefore computed from `G` with all channels scaled to size 1.

    Args:
        gram: `G`, positive semi-definite.
        right: `R`, whose rows lie in the range of `G`.
        precision: Dtype in which `G` was summed. Energies of the size of its rounding count as
            zero.
        floor: Lower bound of the energies. Above 0, only channels without any input count as
            unseen, and the solve needs no eigenvectors.
        cutoff: Energies up to this share of the largest count as zero.

    Raises:
        UnsolvedError: If the solution cannot be trusted in spite of a floor.
    """
    sizes = gram.diagonal().clamp_min(0).sqrt()
    scales = sizes.where(sizes > 0, torch.ones_like(sizes))
    correlations, scaled = (gram + gram.T) / 2 / (scales[:, None] * scales), right / scales
    rounding = torch.finfo(precision).eps
    if floor > 0 and bool((sizes > 0).all()):
        least = rounding if floor < rounding else 0.0
        return solve_ridge(correlations, scaled, 0.0, rounding=least)[0] / scales
    energies, directions = torch.linalg.eigh(correlations)
    measured = energies > max(len(gram) * rounding, cutoff) * energies.max()
    basis = directions[:, measured]
    solution = (scaled @ basis / energies[measured]) @ basis.T / scales
    # The shortest solution has no part in the null space, which scaling has tilted.
    unseen = torch.linalg.qr(directions[:, ~measured] / scales[:, None]).Q
    return solution - (solution @ unseen) @ unseen.T
