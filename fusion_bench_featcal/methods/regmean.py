"""RegMean (Jin et al., ICLR 2023): linear weights by regression on the experts' own features."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.methods.blockwise import LeastSquares, merge_blockwise
from fusion_bench_featcal.settings import FeatCalSettings


def regmean(
    base: nn.Module,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    *,
    off_diagonal: float = 0.95,
    task_weights: Any = "equal",
    **how: Any,
) -> nn.Module:
    """Merge experts with RegMean.

    `W = (sum_i W_i G_i) (sum_i G_i)^-1` for the linear modules of the blocks, with `G_i` the mean
    gram of expert i's own inputs, shrunk off its diagonal; everything else is the experts' mean.
    In input directions that no sample has, where the formula has no value, the mean stays too.

    Args:
        base: Gives structure, dtype and device; none of its values are used.
        experts: Each task's expert.
        batches: Each task's unlabeled model inputs.
        settings: `samples_per_task`, `modules` and `family` are used.
        off_diagonal: Factor of the grams' entries off the diagonal (RegMean's `a`), 0 to 1.
        task_weights: `equal` (the paper's), or `unit_gram`: grams scaled as FeatCal scales them.
        **how: `device`, `autocast` and `progress`, as `merge_blockwise` takes them.

    Returns:
        The merged model.

    Raises:
        CalibrationError: If the run cannot go on.
        ValueError: If an option is out of range.
    """
    method = LeastSquares(
        stream="expert", anchor="mean", off_diagonal=off_diagonal, task_weights=task_weights
    )
    return merge_blockwise(base, experts, batches, settings, method, **how)
