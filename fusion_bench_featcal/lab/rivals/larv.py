"""LARV (arXiv 2602.09413): a factor per block on the experts' steps, before they are merged."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families import resolve_family, stages_of
from fusion_bench_featcal.lab.rivals.matrices import MatrixMerger, ReadSteps, matrix_names
from fusion_bench_featcal.settings import Blocks
from fusion_bench_featcal.settings.fields import setting


class LARV(
    MatrixMerger,
    Blocks,
    option="featcal_mergers/larv",
    source="Wang et al., arXiv 2602.09413",
    without=("modules",),
):
    """LARV, continuous gate: a factor per block on the experts' steps before Iso-C, without data.

    The authors' main version has tiers of fixed factors, whose values are not known to us. A
    block's proxies are means over its linear weights.
    """

    over: str = setting(
        "iso_c",
        "How the scaled steps are merged. `iso_c`: for linear weights their sum with equal "
        "singular values, for all other weights their mean. `task_arithmetic`: their sum.",
        choices=("iso_c", "task_arithmetic"),
    )
    scale: float = setting(
        1.0,
        "Factor by which the merged steps are multiplied. Task arithmetic uses 0.3.",
        gt=0,
    )
    strength: float = setting(
        0.5,
        "Largest distance of a block's factor from 1. With 0, only the merging method acts.",
        ge=0,
        le=1,
    )

    def merge_into(self, model: nn.Module, read: ReadSteps) -> None:
        """Merge all parameters of a model, in place.

        Raises:
            CalibrationError: If no block has a linear weight.
        """
        matrices = matrix_names(model)
        gates = self.gates(model, matrices, read)
        for name, parameter in model.named_parameters():
            start, steps = read(name)
            block = next((block for block in gates if name.startswith(f"{block}.")), None)
            gate = steps.new_ones(len(steps)) if block is None else gates[block].to(steps)
            step = torch.tensordot(gate, steps, 1)
            if self.over == "iso_c":
                step = isotropic(step) if name in matrices else step / len(steps)
            parameter.copy_(start + self.scale * step)

    def gates(
        self, model: nn.Module, matrices: Sequence[str], read: ReadSteps
    ) -> dict[str, Float[Tensor, " t"]]:
        """Return the factors of each block with some of the linear weights.

        Raises:
            CalibrationError: If there is no such block.
        """
        stages, proxies = stages_of(resolve_family(self.family, model), model), {}
        for block in (block for stage in stages for block in stage):
            names = [name for name in matrices if name.startswith(f"{block}.")]
            if names:
                proxies[block] = torch.stack([proxies_of(*read(n)) for n in names]).nanmean(0)
        if not proxies:
            raise CalibrationError(
                f"{self.name} compares blocks by their linear weights, but {type(model).__name__} "
                "has none in its blocks: leave it out"
            )
        scores = scores_of(*torch.stack([*proxies.values()], 1))
        factors = 1 + self.strength * torch.tanh(3 * (scores - 1))
        return dict(zip(proxies, factors.nan_to_num(1.0), strict=True))


def scores_of(
    contrast: Float[Tensor, "b t"], conflict: Float[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Return the scores of all blocks and tasks (Eq. 8). Conflict is standardised over blocks."""
    relative = conflict - conflict.nanmean(0)
    relative = relative / relative.square().nanmean(0).sqrt()
    depth = torch.arange(1, len(contrast) + 1).to(contrast) / len(contrast)
    return contrast * depth.sqrt()[:, None] / (1 + softplus(relative))


def proxies_of(start: Float[Tensor, "m n"], steps: Float[Tensor, "t m n"]) -> Float[Tensor, "2 t"]:
    """Return rank contrast and conflict with the base of each task's step. NaN for steps of 0."""
    contrast = effective_rank(start) / effective_rank(steps)
    right, left = start @ steps.mT, start.mT @ steps
    difference = (right - right.mT).norm(dim=(1, 2)) + (left - left.mT).norm(dim=(1, 2))
    conflict = difference / (2 * start.norm() * steps.norm(dim=(1, 2)))
    return torch.stack([contrast, conflict])


def effective_rank(x: Float[Tensor, "*t m n"]) -> Float[Tensor, "*t"]:
    """Return the exponential of the entropy of squared singular values, relative to their sum."""
    energies = torch.linalg.svdvals(x).square()
    shares = energies / energies.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


def isotropic(x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Return a matrix with the mean of its singular values in place of each (Iso-C)."""
    u, values, vt = torch.linalg.svd(x, full_matrices=False)
    return values.mean() * u @ vt
