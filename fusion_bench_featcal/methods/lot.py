"""LOT Merging (Sun et al., NeurIPS 2025): the layer-wise optimal task vector."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.methods.blockwise import LeastSquares, merge_blockwise
from fusion_bench_featcal.settings import FeatCalSettings


def lot(
    base: nn.Module,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    **how: Any,
) -> nn.Module:
    """Merge experts with LOT Merging.

    With task vectors `T_i = W_i - W_0` and grams `G_i` of expert i's own inputs (which of the
    models gives them is our reading of the paper), a linear weight of the blocks is
    `W_0 + (sum_i T_i G_i) (sum_i G_i)^+`: RegMean without shrinkage, but directions that no sample
    has stay at the base. A LayerNorm's gain is, channel by channel, the mean of task vectors
    weighted by the energy of the normalised input; everything else is the experts' mean.

    Args:
        base: The base model.
        experts: Each task's expert.
        batches: Each task's unlabeled model inputs (the paper uses 16 to 64 a task).
        settings: `samples_per_task`, `modules` and `family` are used.
        **how: `device`, `autocast` and `progress`, as `merge_blockwise` takes them.

    Returns:
        The merged model.

    Raises:
        CalibrationError: If the run cannot go on.
    """
    method = LeastSquares(stream="expert", anchor="base", weighs_gains=True)
    return merge_blockwise(base, experts, batches, settings, method, **how)
