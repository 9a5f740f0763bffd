"""DC-Merge (arXiv 2603.06242): task matrices merged in one orthogonal basis for all tasks."""

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.lab.rivals.matrices import MatrixMerger, nearest_orthogonal
from fusion_bench_featcal.settings.fields import setting


class DCMerge(
    MatrixMerger,
    option="featcal_mergers/dc_merge",
    source="Zhang et al., CVPR 2026, arXiv 2603.06242, and its code",
):
    """DC-Merge: truncated task matrices, aligned and merged in one orthogonal basis, without data.

    Embeddings, position tables, convolutions, biases and norms are the experts' mean.
    """

    scale: float = setting(
        1.0,
        "Factor by which the merged steps of matrices are multiplied. The authors choose it on "
        "validation data, from 0.1 to 3.",
        gt=0,
    )
    density: float = setting(
        1e-3,
        "Share of entries of a task's matrix in the common basis that are kept, from the largest "
        "on. At width 192, 1e-3 keeps 36 entries per task.",
        gt=0,
        le=1,
    )
    smoothing: str = setting(
        "none",
        "How the singular values of a task matrix are smoothed: `none` (the authors' choice for "
        "full fine-tuning), or for LoRA experts `average` (all equal) or `linear` (falling "
        "linearly, at most by the factor `ratio`). Their sum is kept.",
        choices=("none", "average", "linear"),
    )
    ratio: float = setting(
        5.0, "Largest ratio of singular values with `smoothing: linear`, the paper's rho.", ge=1
    )

    def merged_step(self, steps: Float[Tensor, "t m n"]) -> Float[Tensor, "m n"]:
        """Merge the task matrices of one weight.

        Each keeps `min(m, n) / t` singular directions. The nearest orthogonal bases to all kept
        left and all kept right directions span the cover space. There a task's matrix is its block
        on the diagonal and, as tasks overlap, some energy elsewhere, which is masked at the end.
        """
        tasks, rank = len(steps), max(1, min(steps.shape[1:]) // len(steps))
        u, values, vt = torch.linalg.svd(steps, full_matrices=False)
        u, vt = u[..., :rank], vt[:, :rank]
        values = values[:, :rank]
        # Directions of no energy, as LoRA experts have, are arbitrary and must turn no others.
        has_energy = values > values[:, :1] * torch.finfo(values.dtype).eps * max(steps.shape[1:])
        values = smooth(values * has_energy, self.smoothing, self.ratio)
        u, vt = u * has_energy[:, None], vt * has_energy[..., None]
        left_basis = nearest_orthogonal(u.transpose(0, 1).flatten(1))
        right_basis = nearest_orthogonal(vt.flatten(0, 1))
        cores = left_basis.mT @ (u * values[:, None]) @ (vt @ right_basis.mT)
        core = mean_of_agreeing(keep_largest_entries(cores, self.density))
        mask = torch.block_diag(*core.new_ones(tasks, rank, rank))
        return left_basis @ (core * mask) @ right_basis


def smooth(values: Float[Tensor, "t r"], how: str, ratio: float) -> Float[Tensor, "t r"]:
    """Smooth each task's singular values. Their sum does not change, and zeros stay zeros.

    Args:
        values: The singular values, the largest first.
        how: `none`, `average`, or `linear` for a line between largest and smallest value.
        ratio: Largest ratio of both.
    """
    if how == "none":
        return values
    ranks = (values > 0).sum(1, keepdim=True)
    least = values.gather(1, (ranks - 1).clamp_min(0))
    span = (values[:, :1] / least).nan_to_num(1.0).clamp(max=1.0 if how == "average" else ratio)
    position = torch.arange(values.shape[1]).to(ranks) / (ranks - 1).clamp_min(1)
    line = (span + (1 - span) * position) * (values > 0)
    return values.sum(1, keepdim=True) * line / line.sum(1, keepdim=True).clamp_min(1)


def keep_largest_entries(cores: Float[Tensor, "t r r"], share: float) -> Float[Tensor, "t r r"]:
    """Set all but the largest entries of each matrix to zero. At least one is kept."""
    sizes = cores.abs().flatten(1)
    least = sizes.topk(max(1, int(share * sizes.shape[1])), 1).values[:, -1]
    return torch.where(cores.abs() >= least[:, None, None], cores, 0)


def mean_of_agreeing(cores: Float[Tensor, "t r r"]) -> Float[Tensor, "r r"]:
    """Return the mean, entry by entry, of the values that have the sign of the sum (TIES)."""
    sign = cores.sum(0).sign()
    agree = (cores.sign() == sign) & (sign != 0)
    return (cores * agree).sum(0) / agree.sum(0).clamp_min(1)
