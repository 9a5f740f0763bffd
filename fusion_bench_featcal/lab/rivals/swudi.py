"""SWUDI (arXiv 2606.07289): WUDI-Merging's least squares, by one eigendecomposition per weight."""

import math

from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.core.swudi import merge_task_vectors
from fusion_bench_featcal.lab.rivals.matrices import MatrixMerger
from fusion_bench_featcal.settings.fields import setting


class SWUDI(MatrixMerger, option="featcal_mergers/swudi", source="Wei et al., arXiv 2606.07289"):
    """ASWUDI: WUDI-Merging's least squares in closed form, without data and without settings.

    With `time` and `rank` it is SWUDI, gradient flow that ends early. Embeddings, position tables,
    convolutions, biases and norms are the experts' mean.
    """

    time: float | None = setting(
        None,
        "Time at which the gradient flow ends, the paper's s. A direction with eigenvalue l has "
        "then covered the share 1 - exp(-s l) of its way. Null: the flow runs to its end, as in "
        "ASWUDI.",
        gt=0,
    )
    rank: float | None = setting(
        None,
        "Share of the input directions that move, from the largest eigenvalue on. Null: ASWUDI's "
        "share, which follows from the eigenvalues.",
        gt=0,
        le=1,
    )

    def merged_step(self, steps: Float[Tensor, "t m n"]) -> Float[Tensor, "m n"]:
        """Merge the task matrices of one weight (`merge_task_vectors`)."""
        steps = steps.to(solve_dtype(steps.device))
        time = math.inf if self.time is None else self.time
        return merge_task_vectors(steps, time=time, rank=self.rank)
