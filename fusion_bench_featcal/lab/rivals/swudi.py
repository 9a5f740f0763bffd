"""SWUDI (arXiv 2606.07289): WUDI-Merging's least squares, by one eigendecomposition per weight."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.lab.rivals.matrices import MatrixMerger
from fusion_bench_featcal.settings.fields import setting


class SWUDI(MatrixMerger, option="featcal_mergers/swudi", source="Wei et al., arXiv 2606.07289"):
    """SWUDI: WUDI-Merging in closed form, as gradient flow ended early, without data.

    Embeddings, position tables, convolutions, biases and norms are the experts' mean.
    """

    time: float = setting(
        100.0,
        "Time at which the gradient flow ends, the paper's s. A direction of eigenvalue l has "
        "gone the share 1 - exp(-s l) of its way.",
        gt=0,
    )
    rank: float = setting(
        1.0, "Share of the input directions that move, those of largest eigenvalue.", gt=0, le=1
    )

    def merged_step(self, steps: Float[Tensor, "t m n"]) -> Float[Tensor, "m n"]:
        """Merge the task matrices of one weight.

        The flow descends `sum_i |(T - t_i) t_i'|^2 / |t_i|^2` from the sum T_0 of the steps t_i.
        With `G_i = t_i' t_i / |t_i|^2`, S the sum of all G_i, and B that of all `t_i G_i`, it ends
        at `T_0 + (B - T_0 S) Q f(l) Q'` with `f(l) = (1 - exp(-s l)) / l` of S = Q l Q'.
        """
        steps = steps.to(solve_dtype(steps.device))
        start, gram, slope = steps.sum(0), 0, 0
        for step in steps:
            unit = step / step.norm().clamp_min(torch.finfo(step.dtype).tiny)
            gram = gram + unit.mT @ unit
            slope = slope + (step - start) @ unit.mT @ unit
        values, directions = torch.linalg.eigh(gram)  # the smallest first
        least = len(values) * torch.finfo(values.dtype).eps * values[-1]
        filtered = torch.where(values > least, -torch.expm1(-self.time * values) / values, 0)
        filtered[: len(values) - math.ceil(self.rank * len(values))] = 0
        return start + slope @ (directions * filtered) @ directions.mT
