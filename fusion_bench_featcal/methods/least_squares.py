"""The weight that reproduces every expert's outputs best, from running sums over the experts.

RegMean, RegMean++ and LOT Merging all minimise `sum_i p_i |(W - W_i) X_i|^2`. They differ in the
rows `X_i`, in what is done to the grams `X_i X_i'`, and in the anchor: the weight that stays in
input directions which no row has.
"""

import torch
from torch import Tensor

from fusion_bench_featcal.core.cholesky import factor_of, solve_dtype, trusted_condition
from fusion_bench_featcal.core.finite import read_back


def shrink_off_diagonal(gram: Tensor, kept: float) -> Tensor:
    """Copy of a Gram matrix with its entries off the diagonal scaled (RegMean's regularisation)."""
    shrunk = gram * kept
    shrunk.diagonal().copy_(gram.diagonal())
    return shrunk


def solve_seen(
    gram: Tensor,
    right: Tensor,
    *,
    precision: torch.dtype,
    floor: float = 0.0,
    cutoff: float = 0.0,
) -> tuple[Tensor, int]:
    """Minimum-norm solution of `S A = R`: exact where `A` has energy, zero where it has none.

    Channels may differ in size by orders of magnitude, and each is known to its own precision. So
    energy is judged where all channels have size 1.

    Args:
        gram: `A`, `[d, d]`, symmetric and positive semi-definite.
        right: `R`, `[m, d]`, whose rows lie in the range of `A`.
        precision: Dtype in which `A` was summed; energies of the size of its rounding count as
            none.
        floor: Known lower bound of the energies where all channels have size 1. Above 0 only
            channels without any input are unseen, and the solve needs no eigenvectors.
        cutoff: Energies up to this share of the largest count as none.

    Returns:
        `R A^+`, `[m, d]`, and the number of directions with energy.
    """
    sizes = gram.diagonal().clamp_min(0).sqrt()
    scales = sizes.where(sizes > 0, torch.ones_like(sizes))
    correlations = (gram + gram.T) / 2 / (scales[:, None] * scales)
    if floor > 0 and bool((sizes > 0).all()):
        rounding = torch.finfo(precision).eps
        factor = factor_of(correlations)
        signs = read_back([factor.signs])
        trusted_condition(signs, size=len(gram), floor=floor, rounding=rounding)
        return torch.cholesky_solve((right / scales).T, factor.lower).T / scales, len(gram)
    energies, directions = torch.linalg.eigh(correlations)
    least = max(len(gram) * torch.finfo(precision).eps, cutoff)
    seen = energies > least * energies.max()
    basis = directions[:, seen]
    solution = ((right / scales) @ basis / energies[seen]) @ basis.T / scales
    # Of all solutions the shortest has no part in the null space, which scaling has tilted.
    unseen = torch.linalg.qr(directions[:, ~seen] / scales[:, None]).Q
    return solution - (solution @ unseen) @ unseen.T, int(seen.sum())


class LinearMean:
    """Running sums of one linear module; one expert is added at a time."""

    def __init__(
        self, anchor: Tensor, *, floor: float = 0.0, cutoff: float = 0.0, scale: float = 1.0
    ) -> None:
        """Start with no expert, and the weight `[m, d]` that unseen input directions keep.

        `floor` and `cutoff` are as for `solve_seen`; shrinking by a factor `a` leaves a floor of
        `1 - a`. The step from the anchor is multiplied by `scale`.
        """
        wide = solve_dtype(anchor.device)
        self._anchor = anchor.to(wide, copy=True)
        self._gram = self._anchor.new_zeros(anchor.shape[1], anchor.shape[1])
        self._right = torch.zeros_like(self._anchor)
        self._precision = wide
        self._floor, self._cutoff, self._scale = floor, cutoff, scale

    def add(self, gram: Tensor, weight: Tensor) -> None:
        """Add an expert: second moment of its inputs `[d, d]`, and its weight `[m, d]`."""
        self._precision = gram.dtype
        wide = gram.to(self._gram.dtype)
        self._gram += wide
        self._right += (weight.to(wide.dtype) - self._anchor) @ wide

    def solve(self) -> tuple[Tensor, int]:
        """The merged weight `[m, d]` in the solve's dtype, and how many directions were seen."""
        step, seen = solve_seen(
            self._gram,
            self._right,
            precision=self._precision,
            floor=self._floor,
            cutoff=self._cutoff,
        )
        return self._anchor + self._scale * step, seen


class GainMean:
    """Running sums of one LayerNorm's gain: each channel on its own, weighted by its energy."""

    def __init__(self, anchor: Tensor, *, scale: float = 1.0) -> None:
        """Start with no expert and the gain `[d]` that channels without energy keep.

        The step from the anchor is multiplied by `scale`.
        """
        self._scale = scale
        self._anchor = anchor.to(solve_dtype(anchor.device), copy=True)
        self._energy = torch.zeros_like(self._anchor)
        self._right = torch.zeros_like(self._anchor)

    def add(self, energy: Tensor, gain: Tensor) -> None:
        """Add an expert: mean square of its normalised inputs `[d]`, and its gain `[d]`."""
        self._energy += energy
        self._right += energy * (gain.to(self._anchor) - self._anchor)

    def solve(self) -> Tensor:
        """The merged gain, `[d]`, in the solve's dtype."""
        step = self._right / self._energy.where(self._energy > 0, torch.ones_like(self._energy))
        return self._anchor + self._scale * step
