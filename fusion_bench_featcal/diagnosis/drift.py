"""The drift at a block's output, divided into its causes (Eq. 3), and the principal plane."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity


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
    dtype = torch.promote_types(features.dtype, torch.float32)
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
