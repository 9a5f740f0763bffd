"""Least-squares systems `E G = R` whose Gram matrix may be singular."""

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.solve import solve_ridge


def shrink_off_diagonal(gram: Float[Tensor, "d d"], factor: float) -> Float[Tensor, "d d"]:
    """Return a Gram matrix with its entries off the diagonal scaled (RegMean's shrinkage)."""
    shrunk = gram * factor
    shrunk.diagonal().copy_(gram.diagonal())
    return shrunk


def solve_seen(
    gram: Float[Tensor, "d d"],
    right: Float[Tensor, "m d"],
    *,
    precision: torch.dtype,
    floor: float = 0.0,
    cutoff: float = 0.0,
) -> tuple[Float[Tensor, "m d"], int]:
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

    Returns:
        `R G^+`, and the number of directions with energy.

    Raises:
        UnsolvedError: If the solution cannot be trusted in spite of a floor.
    """
    sizes = gram.diagonal().clamp_min(0).sqrt()
    scales = sizes.where(sizes > 0, torch.ones_like(sizes))
    correlations, scaled = (gram + gram.T) / 2 / (scales[:, None] * scales), right / scales
    rounding = torch.finfo(precision).eps
    if floor > 0 and bool((sizes > 0).all()):
        doubt = rounding if floor < rounding else 0.0
        step, _ = solve_ridge(correlations, scaled, 0.0, rounding=doubt)
        return step / scales, len(gram)
    energies, directions = torch.linalg.eigh(correlations)
    measured = energies > max(len(gram) * rounding, cutoff) * energies.max()
    basis = directions[:, measured]
    solution = (scaled @ basis / energies[measured]) @ basis.T / scales
    # The shortest solution has no part in the null space, which scaling has tilted.
    unseen = torch.linalg.qr(directions[:, ~measured] / scales[:, None]).Q
    return solution - (solution @ unseen) @ unseen.T, int(measured.sum())
