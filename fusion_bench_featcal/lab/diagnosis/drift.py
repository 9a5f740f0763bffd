"""The drift at a block's output, split into its causes (Eq. 3), and moments of final features."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fusion_bench_featcal.streams.batch import CountedRows

COLUMNS: tuple[str, ...] = (
    "drift", "drift_sq", "expert_sq", "cosine", "mismatch", "mismatch_sq", "propagation",
    "propagation_sq", "product",
)  # fmt: skip
"""Columns of `split_drift`."""


def split_drift(features: Tensor, expert: Tensor, crossed: Tensor) -> Tensor:
    """Split the drift at a block's output into local mismatch and upstream propagation (Eq. 3).

    With `f` the model's block and `f_exp` the expert's, on their inputs `x` and `x_exp`, the drift
    `e = f(x) - f_exp(x_exp)` is the sum of the mismatch `m = f(x_exp) - f_exp(x_exp)` and the
    propagation `p = f(x) - f(x_exp)`.

    Args:
        features: `f(x)`, `[n, d]`.
        expert: `f_exp(x_exp)` for the same rows, `[n, d]`.
        crossed: `f(x_exp)`, `[n, d]`.

    Returns:
        `[n, 9]`, with `COLUMNS`: `|e|`, `|e|^2`, `|f_exp|^2`, the cosine of `f` and `f_exp`, `|m|`,
        `|m|^2`, `|p|`, `|p|^2` and `m . p`.
    """
    dtype = torch.promote_types(features.dtype, torch.float32)
    features, expert, crossed = (part.to(dtype) for part in (features, expert, crossed))
    mismatch, propagation = crossed - expert, features - crossed
    e, m, p = (
        torch.linalg.vector_norm(part, dim=1) for part in (features - expert, mismatch, propagation)
    )
    cosine = cosine_similarity(features, expert, dim=1)
    product = (mismatch * propagation).sum(1)
    columns = (e, e**2, expert.square().sum(1), cosine, m, m**2, p, p**2, product)
    return torch.stack(columns, dim=1)


def item_means(values: Tensor, items: int, counted: CountedRows | None) -> Tensor:
    """Return means over each item's rows, in float64.

    Args:
        values: `[rows, k]`, rows of counted positions, item by item.
        items: Number of items.
        counted: The counted positions, or None if every item has equally many rows.

    Returns:
        `[items, k]`.
    """
    values = values.double()
    if counted is None or counted.index is None:
        return values.reshape(items, -1, values.shape[1]).mean(1)
    owner = counted.index // counted.shape[1:].numel()
    sums = values.new_zeros(items, values.shape[1]).index_add_(0, owner, values)
    return sums / owner.bincount(minlength=items)[:, None]


def drift_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a block from means of `COLUMNS` over items.

    `relative` is the root mean square of the drift divided by that of the experts' features,
    `between` the cosine of the two terms, and `share` the propagation's share, `p . e / |e|^2`.
    """
    tiny = torch.finfo(torch.float64).tiny
    products = (means["mismatch_sq"] * means["propagation_sq"]) ** 0.5
    return {
        "drift": means["drift"],
        "relative": (means["drift_sq"] / max(means["expert_sq"], tiny)) ** 0.5,
        "cosine": means["cosine"],
        "mismatch": means["mismatch"],
        "propagation": means["propagation"],
        "between": means["product"] / max(products, tiny),
        "share": (means["propagation_sq"] + means["product"]) / max(means["drift_sq"], tiny),
    }


def principal_plane(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of features and their first two principal directions, `[d]` and `[d, 2]`.

    The largest entry of a direction is positive, so that equal features give equal directions.
    """
    features = features.double()
    center = features.mean(0)
    directions = torch.linalg.svd(features - center, full_matrices=False).Vh[:2].T
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return center, directions * largest.sign()


def explained_shares(features: Tensor) -> list[float]:
    """Return the shares of variance along the first two principal directions (PCA).

    Args:
        features: `[n, d]`, with n, d >= 2.
    """
    features = features.double()
    variances = torch.linalg.svdvals(features - features.mean(0)).square()
    tiny = torch.finfo(torch.float64).tiny
    return (variances[:2] / variances.sum().clamp(min=tiny)).tolist()
