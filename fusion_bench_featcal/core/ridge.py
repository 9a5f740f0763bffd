"""Choice of a ridge by held-out error: each fold is predicted from the sums of the others."""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.solve import SINGLE_RIDGE, divided, factor_in_place, shifted

GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Candidate ridges, relative to the mean eigenvalue of the inputs' second moments."""

NO_CHANGE = math.inf
"""Candidate for which the modules do not change."""

_START = 2


def choose_ridge(folds: Moments, *, biased: bool) -> float:
    """Choose the ridge with the smallest cross-validation error, summed over all maps.

    Args:
        folds: Sums by fold, with the targets as `y`.
        biased: Whether the modules have a bias, which absorbs the means.

    Returns:
        A value of `GRID`, or infinity for no change. 1 if all samples are in one fold.
    """
    used = [number for number, count in enumerate(folds.count[:, 0].tolist()) if count > 0]
    if len(used) < 2:
        return 1.0
    whole, candidates = folds.total(), (*GRID, NO_CHANGE)
    by_fold = [folds.fold(number) for number in used]
    trained = [whole.without(fold).means(centred=biased) for fold in by_fold]

    def error(number: int) -> float:
        ridge = candidates[number]  # one fold at a time: its systems are large
        pairs = zip(trained, by_fold, strict=True)
        return float(sum(held_out_error(train, fold, ridge, biased) for train, fold in pairs))

    return candidates[downhill(_START, len(candidates), error)]


def downhill(start: int, count: int, error_of: Callable[[int], float]) -> int:
    """Return the first local minimum of the error, walking downhill from a candidate.

    Args:
        start: Index of the first candidate.
        count: Number of candidates.
        error_of: Error of a candidate. NaN counts as infinite.
    """

    @cache
    def error(number: int) -> float:
        value = error_of(number)
        return value if math.isfinite(value) else math.inf

    for direction in (1, -1):
        number = start
        while 0 <= number + direction < count and (
            error(number + direction) < error(number)
            or (direction > 0 and error(number) == math.inf)
        ):
            number += direction
        if number != start:
            return number
    return start


def held_out_error(train: Moments, fold: Moments, ridge: float, biased: bool) -> Tensor:
    """Return the sum of `|E x + b - y|^2` over held-out rows, minus the sum of `|y|^2`.

    Args:
        train: Means over the other folds.
        fold: Sums over the held-out rows.
        ridge: The candidate.
        biased: Whether `b` follows from the means. Otherwise it is zero.
    """
    step = torch.zeros_like(train.cross)
    if ridge != NO_CHANGE:
        dtype = train.gram.dtype if ridge >= SINGLE_RIDGE else torch.float64
        scale = train.gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
        system = shifted(train.gram, ridge * scale, dtype)
        failed = factor_in_place(system[0])
        step = divided(train.cross.to(dtype), system).to(step.dtype)
        step = torch.where(failed == 0, step, torch.nan)
    error = ((step @ fold.gram - 2 * fold.cross) * step).sum().double()
    if biased:
        bias = train.y - (step @ train.x[..., None])[..., 0]
        ahead = (step @ fold.x[..., None])[..., 0] - fold.y
        both = 2 * (bias * ahead).sum(-1) + fold.count * bias.square().sum(-1)
        error = error + both.sum().double()
    return error
