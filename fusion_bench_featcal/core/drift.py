"""Drift: the distance of the calibrated model's features from the expert's (Eq. 2)."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fusion_bench_featcal.core.cholesky import solve_dtype
from fusion_bench_featcal.core.moments import moment_dtype

_ROWS = 256
"""Rows of weights that are compared at once."""


class DriftSums(NamedTuple):
    """Sums over rows, as Python floats, that add up over batches."""

    drift: float
    """Sum of `|h_cal - h_exp|`, the L2 norms of the drift."""
    drift_sq: float
    """Sum of `|h_cal - h_exp|^2`."""
    expert_sq: float
    """Sum of `|h_exp|^2`."""
    rows: float
    """Number of rows."""


def sum_drift(cal: Tensor, exp: Tensor) -> Tensor:
    """Sums over rows that all count, `[3]`: the drift's norms, their squares, the expert's squares.

    The host does not look at them.

    Args:
        cal: Features of the calibrated model, `[n, d]`.
        exp: Features of the expert for the same rows, `[n, d]`.
    """
    dtype = moment_dtype(cal.dtype)
    exp = exp.to(dtype)
    norms = torch.linalg.vector_norm(cal.to(dtype) - exp, dim=1)
    return torch.stack([norms.sum(), (norms * norms).sum(), (exp * exp).sum()])


def sum_agreement(features: Tensor, expert: Tensor) -> Tensor:
    """Sums over rows, `[4]`: squared drift, the expert's squares, cosines, and how many rows.

    The host does not look at them.

    Args:
        features: Features of a model, `[n, d]`.
        expert: Features of the expert for the same rows, `[n, d]`.
    """
    _, squares, expert_squares = sum_drift(features, expert)
    dtype = moment_dtype(features.dtype)
    cosines = cosine_similarity(features.to(dtype), expert.to(dtype), dim=1)
    rows = torch.as_tensor(float(len(features)), device=squares.device)
    return torch.stack([squares, expert_squares, cosines.sum(), rows.to(squares)])


def weight_distance(left: Tensor, right: Tensor) -> Tensor:
    """Frobenius norm of the difference of two weights, `[]`, without a third weight in memory.

    The host does not look at it.

    Args:
        left: A weight, `[m, ...]`.
        right: Another one of its shape.
    """
    rows = zip(left.split(_ROWS), right.split(_ROWS), strict=True)
    wide = solve_dtype(left.device)
    norms = [torch.linalg.vector_norm(a.float() - b.float(), dtype=wide) for a, b in rows]
    return torch.linalg.vector_norm(torch.stack(norms))


def drift_norm_sum(h_cal: Tensor, h_exp: Tensor, valid: Tensor | None = None) -> DriftSums:
    """Sum the drift of a batch of features (Eq. 2).

    Args:
        h_cal: Features of the calibrated model, `[..., d]`.
        h_exp: Features of the expert for the same rows, `[..., d]`.
        valid: Mask of the rows that count, shaped like the leading dimensions; None: all.

    Returns:
        The sums over the counted rows.
    """
    cal = h_cal.reshape(-1, h_cal.shape[-1])
    exp = h_exp.reshape(-1, h_exp.shape[-1])
    if valid is not None:
        counted = valid.reshape(-1) > 0
        cal, exp = cal[counted], exp[counted]
    return DriftSums(*sum_drift(cal, exp).tolist(), rows=float(len(cal)))
