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


class DriftParts(NamedTuple):
    """Columns of `split_drift`: numbers of one row of features, or their means over rows."""

    drift: float
    """`|e|`, the L2 norm of the drift `e = h - h_exp`."""
    drift_sq: float
    """`|e|^2`."""
    expert_sq: float
    """`|h_exp|^2`."""
    cosine: float
    """Cosine of `h` and `h_exp`."""
    mismatch: float
    """`|m|`, the norm of the local mismatch."""
    mismatch_sq: float
    """`|m|^2`."""
    propagation: float
    """`|p|`, the norm of the upstream propagation."""
    propagation_sq: float
    """`|p|^2`."""
    product: float
    """`m . p`, so that `|e|^2 = |m|^2 + |p|^2 + 2 m . p`."""


def split_drift(features: Tensor, expert: Tensor, crossed: Tensor) -> Tensor:
    """Split the drift at a block's output into local mismatch and upstream propagation (Eq. 3).

    With `f` the model's block and `f_exp` the expert's, on their inputs `x` and `x_exp`:
    the mismatch is `f(x_exp) - f_exp(x_exp)`, the propagation `f(x) - f(x_exp)`.

    Args:
        features: `f(x)`, `[n, d]`.
        expert: `f_exp(x_exp)` for the same rows, `[n, d]`.
        crossed: `f(x_exp)`, `[n, d]`.

    Returns:
        `[n, 9]`, columns as `DriftParts`.
    """
    dtype = moment_dtype(features.dtype)
    features, expert, crossed = (part.to(dtype) for part in (features, expert, crossed))
    drift, mismatch, propagation = features - expert, crossed - expert, features - crossed
    sizes = {
        name: torch.linalg.vector_norm(part, dim=1)
        for name, part in (("e", drift), ("m", mismatch), ("p", propagation))
    }
    columns = {
        "drift": sizes["e"],
        "drift_sq": sizes["e"].square(),
        "expert_sq": expert.square().sum(1),
        "cosine": cosine_similarity(features, expert, dim=1),
        "mismatch": sizes["m"],
        "mismatch_sq": sizes["m"].square(),
        "propagation": sizes["p"],
        "propagation_sq": sizes["p"].square(),
        "product": (mismatch * propagation).sum(1),
    }
    return torch.stack([columns[name] for name in DriftParts._fields], dim=1)


def principal_plane(features: Tensor) -> Tensor:
    """Project rows on the two directions of largest variance (PCA).

    Each direction's sign makes its largest coordinate positive.

    Args:
        features: `[n, d]`, with n, d >= 2.

    Returns:
        `[n, 2]`, float64.
    """
    centred = features.double() - features.double().mean(0)
    directions = torch.linalg.svd(centred, full_matrices=False).Vh[:2]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return centred @ (directions * torch.where(largest < 0, -1.0, 1.0)).T
