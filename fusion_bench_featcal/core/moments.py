"""Sums over a task's calibration rows, from which every solve is made (Eqs. 13, 14, 56).

Rows are `[n, d]` here (the paper writes inputs as columns). Sums are kept undivided, so that parts
of a task (batches, devices) merge by `+`; they are divided by the total row weight at the end.
"""

from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

MOMENT_DTYPE = torch.float32
"""Least precise dtype in which sums are kept, whatever the model's dtype is."""

Moments = TypeVar("Moments", "LinearMoments", "NormMoments")


def _add(left: Moments, right: Moments) -> Moments:
    sums = {f.name: getattr(left, f.name) + getattr(right, f.name) for f in fields(left)}
    return type(left)(**sums)


@dataclass(frozen=True, kw_only=True)
class LinearMoments:
    """Weighted sums over one task's inputs of a linear module (Eq. 13, undivided).

    Attributes:
        gram: `sum p x_cal x_cal'`, `[d, d]`, not centred.
        cross_exp: `sum p x_exp x_cal'`, `[d, d]`; row index: expert feature.
        sum_cal: `sum p x_cal`, `[d]`.
        sum_exp: `sum p x_exp`, `[d]`.
        weight: `sum p`, scalar; the number of rows where all weigh 1.
        drift_sq: `sum p |x_cal - x_exp|^2`, scalar.
    """

    gram: Float[Tensor, "d d"]
    cross_exp: Float[Tensor, "d d"]
    sum_cal: Float[Tensor, " d"]
    sum_exp: Float[Tensor, " d"]
    weight: Float[Tensor, ""]
    drift_sq: Float[Tensor, ""]

    def __add__(self, other: "LinearMoments") -> "LinearMoments":
        return _add(self, other)

    def cross(self, mix_alpha: float) -> Float[Tensor, "d d"]:
        """Mean target-input cross moment `C = a X_exp X_cal'/n + (1-a) G` (Eqs. 10, 13)."""
        mixed = mix_alpha * self.cross_exp + (1 - mix_alpha) * self.gram
        return mixed / self.weight

    def mean_target(self, mix_alpha: float) -> Float[Tensor, " d"]:
        """Mean target input `mu_tgt`, `[d]` (Eqs. 10, 51)."""
        return (mix_alpha * self.sum_exp + (1 - mix_alpha) * self.sum_cal) / self.weight


@dataclass(frozen=True, kw_only=True)
class NormMoments:
    """Weighted sums over one task's normalised inputs of a LayerNorm (Eq. 56, undivided).

    Attributes:
        sum_z: `sum p z`, `[d]`.
        sum_z_sq: `sum p z^2`, `[d]`.
        weight: `sum p`, scalar.
    """

    sum_z: Float[Tensor, " d"]
    sum_z_sq: Float[Tensor, " d"]
    weight: Float[Tensor, ""]

    def __add__(self, other: "NormMoments") -> "NormMoments":
        return _add(self, other)


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which rows of `dtype` are summed: float64 stays, all else becomes float32."""
    return torch.promote_types(dtype, MOMENT_DTYPE)


def counted_rows(
    rows: tuple[Tensor, ...], row_weights: Tensor | None, dtype: torch.dtype | None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Rows that count, in the summing dtype, and their weights (None: all 1).

    Rows of weight zero are dropped and not multiplied: padding may hold NaN, and NaN * 0 is NaN.

    Args:
        rows: Tensors `[n, d]` of the same rows.
        row_weights: Weight of each row, `[n]`, finite and >= 0; None: every row weighs 1.
        dtype: The summing dtype; None: float64 for float64 rows, else float32.

    Returns:
        Each tensor's rows that count, and their weights.

    Raises:
        ValueError: If a weight is negative or not finite, or there is not one per row.
    """
    dtype = dtype or moment_dtype(rows[0].dtype)
    if row_weights is None:
        return tuple(part.to(dtype) for part in rows), None
    if row_weights.shape != rows[0].shape[:1]:
        raise ValueError(
            f"row_weights must be one per row, got {tuple(row_weights.shape)} for "
            f"{tuple(rows[0].shape)} rows"
        )
    if bool((row_weights < 0).any()) or not bool(torch.isfinite(row_weights).all()):
        raise ValueError("row_weights must be finite and >= 0")
    counted = row_weights > 0
    kept = tuple(part[counted].to(dtype) for part in rows)
    return kept, row_weights[counted].to(dtype)


def linear_moments(
    x_cal: Tensor,
    x_exp: Tensor,
    row_weights: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> LinearMoments:
    """Sum one batch of a linear module's inputs (Eq. 13).

    Args:
        x_cal: Inputs in the calibrated model, `[n, d]`, any floating dtype.
        x_exp: Inputs of the same rows in the task's expert, `[n, d]`.
        row_weights: Weight of each row, `[n]`, finite and >= 0; rows of weight 0 do not count at
            all. None: every row weighs 1.
        dtype: Dtype of the sums. None: float64 for float64 rows, else float32.

    Returns:
        The sums of these rows; add them over batches.

    Raises:
        ValueError: If shapes differ or a weight is negative or not finite.
    """
    if x_cal.ndim != 2 or x_cal.shape != x_exp.shape:
        raise ValueError(
            f"inputs must be two [n, d] of one shape, got {tuple(x_cal.shape)} (calibrated) and "
            f"{tuple(x_exp.shape)} (expert)"
        )
    (x_cal, x_exp), weights = counted_rows((x_cal, x_exp), row_weights, dtype)
    weighted = x_cal if weights is None else x_cal * weights[:, None]
    weighted_exp = x_exp if weights is None else x_exp * weights[:, None]
    total = x_cal.new_tensor(float(len(x_cal))) if weights is None else weights.sum()
    drift = x_cal - x_exp
    drift_sq = (drift * drift) if weights is None else (drift * drift) * weights[:, None]
    return LinearMoments(
        gram=weighted.T @ x_cal,
        cross_exp=weighted_exp.T @ x_cal,
        sum_cal=weighted.sum(0),
        sum_exp=weighted_exp.sum(0),
        weight=total,
        drift_sq=drift_sq.sum(),
    )


def normalised_input(x: Tensor, eps: float) -> Tensor:
    """What a LayerNorm computes before its gain and shift (Eq. 56).

    Args:
        x: Rows `[n, d]`, any floating dtype.
        eps: The LayerNorm's own epsilon.

    Returns:
        `(x - mean) / sqrt(var + eps)` of each row, `[n, d]`, in float32 or better.
    """
    x = x.to(moment_dtype(x.dtype))
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)


def norm_moments(
    z: Tensor, row_weights: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> NormMoments:
    """Sum one batch of a LayerNorm's normalised inputs (Eq. 56).

    Args:
        z: Normalised rows `[n, d]` of the calibrated model, from `normalised_input`.
        row_weights: Weight of each row, `[n]`, as in `linear_moments`.
        dtype: Dtype of the sums. None: float64 for float64 rows, else float32.

    Returns:
        The sums of these rows; add them over batches.

    Raises:
        ValueError: If `z` is not `[n, d]` or a weight is negative or not finite.
    """
    if z.ndim != 2:
        raise ValueError(f"normalised inputs must be [n, d], got {tuple(z.shape)}")
    (z,), weights = counted_rows((z,), row_weights, dtype)
    return sum_normalised(z, weights)


def sum_normalised(z: Tensor, weights: Tensor | None) -> NormMoments:
    """`norm_moments` of rows that all count, unchecked: the host looks at no weight.

    Args:
        z: Normalised rows `[n, d]`, in the dtype of the sums.
        weights: Weight of each row, `[n]`, finite and > 0, in that dtype; None: all weigh 1.
    """
    weighted = z if weights is None else z * weights[:, None]
    total = z.new_full((), len(z)) if weights is None else weights.sum()
    return NormMoments(sum_z=weighted.sum(0), sum_z_sq=(weighted * z).sum(0), weight=total)


def frobenius_norm(matrix: Float[Tensor, "m d"]) -> Float[Tensor, ""]:
    """Frobenius norm, exact to rounding at any size.

    torch's own float32 norm of a large matrix sums millions of squares in one accumulator and is
    up to 6e-3 too small on CPU. Row norms are short sums; their norm, taken in float64, is one too.

    Args:
        matrix: `[m, d]`.

    Returns:
        The norm as a scalar of the matrix's dtype.
    """
    rows = torch.linalg.vector_norm(matrix, dim=1)
    wide = rows if rows.device.type == "mps" else rows.double()  # MPS has no float64
    return torch.linalg.vector_norm(wide).to(matrix.dtype)


def gram_norm(moments: LinearMoments) -> Float[Tensor, ""]:
    """Frobenius norm of the mean gram, `|G|_F` (Eq. 14)."""
    return frobenius_norm(moments.gram) / moments.weight


def task_weight(moments: LinearMoments, eps: float) -> Float[Tensor, ""]:
    """Weight of a task, `w = 1 / max(|G|_F, eps)` with the mean gram `G` (Eq. 14).

    Args:
        moments: The task's sums over all its rows.
        eps: Floor of the norm.

    Returns:
        The weight, a scalar of the sums' dtype.

    Raises:
        ZeroDivisionError: If norm and floor are both zero.
    """
    return weight_of_norm(gram_norm(moments), eps)


def weight_of_norm(norm: Float[Tensor, ""], eps: float) -> Float[Tensor, ""]:
    """Weight of a task whose mean gram has a given norm (Eq. 14), as `task_weight` gives it.

    Where `eps` is 0 the host looks at the norm.
    """
    norm = norm.clamp_min(eps)
    if eps == 0 and float(norm) == 0:
        raise ZeroDivisionError("all inputs are zero and eps is 0: the task has no weight")
    return 1 / norm
