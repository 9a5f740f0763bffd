"""Sums over a task's calibration rows, from which every solve is made (Eqs. 13, 14, 56).

Rows are `[n, d]` here (the paper writes inputs as columns). Sums are kept undivided, so that parts
of a task (batches, devices) add up; they are divided by the total row weight at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.finite import not_finite
from fusion_bench_featcal.core.products import (
    add_lower_gram,
    add_product,
    columns_of,
    mirror_lower,
    times_transposed,
)

MOMENT_DTYPE = torch.float32
"""Least precise dtype in which sums are kept, whatever the model's dtype is."""

MOST_ROWS = 4096
"""So many rows are multiplied at a time: products may take copies of them."""

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

    def means(self, mix_alpha: float, dtype: torch.dtype) -> "TaskMeans":
        """Means over the rows, as `LinearSystem.fold` takes them.

        Args:
            mix_alpha: alpha (Eq. 10).
            dtype: Dtype of the means.
        """
        weight = self.weight.to(dtype)
        gram, cross = self.gram.to(dtype), self.cross_exp.to(dtype)
        mean_cal, mean_exp = self.sum_cal.to(dtype) / weight, self.sum_exp.to(dtype) / weight
        return TaskMeans(
            gram=gram / weight,
            shift=mix_alpha * (cross - gram).T / weight,
            reached={},
            mean_cal=mean_cal,
            mean_target=mean_cal + mix_alpha * (mean_exp - mean_cal),
            rounding=torch.finfo(self.gram.dtype).eps,
        )


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


def outputs_are_few(outputs: int, width: int) -> bool:
    """Tell whether `W_i C_i` of modules is summed from the rows, which costs less then.

    Args:
        outputs: Outputs of all modules that share an input.
        width: Width of that input.
    """
    return 2 * outputs <= width


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
    sums = LinearSums(x_cal, mix_alpha=1.0, dtype=x_cal.dtype)
    sums.add(x_cal, x_exp, weights)
    assert sums.cross is not None  # as alpha is 1
    drift_sq = (x_cal - x_exp).square().sum(1)
    return LinearMoments(
        gram=mirror_lower(sums.gram),
        cross_exp=sums.gram + sums.cross.T,
        sum_cal=sums.sum_cal,
        sum_exp=sums.sum_cal + sums.sum_shift,
        weight=sums.weight,
        drift_sq=drift_sq.sum() if weights is None else weights @ drift_sq,
    )


class LinearSums:
    """Running sums over one task's rows, for linear modules that share their input (Eq. 13).

    The cross moment enters by its difference to the gram: equal features of both models give
    exactly zero, and unlike ones a small matrix with a small error. Where the modules have few
    outputs, `W_i C_i` is summed from the rows in its place, which costs less.

    Attributes:
        gram: `sum p x_cal x_cal'`, `[d, d]`; only its lower triangle is formed.
        cross: `sum p x_cal (x_exp - x_cal)'`, `[d, d]`; None where alpha is 0, or for `reached`.
        reached: `sum p (W_i x_tgt) x_cal'` of each module, `[m, d]`; empty where there is `cross`.
        sum_cal: `sum p x_cal`, `[d]`.
        sum_shift: `sum p (x_exp - x_cal)`, `[d]`.
        weight: `sum p`, a scalar.
    """

    def __init__(
        self,
        like: Tensor,
        *,
        mix_alpha: float,
        expert_weights: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype = MOMENT_DTYPE,
        mean_dtype: torch.dtype = MOMENT_DTYPE,
    ) -> None:
        """Start with no rows.

        Args:
            like: A module's input, `[..., d]`, for width, dtype and device.
            mix_alpha: alpha (Eq. 10); at 0 expert features need not be given.
            expert_weights: `W_i` of each module by name, `[m, d]`; None: the cross moment is
                formed, however few outputs there are.
            dtype: Least precise dtype of the sums.
            mean_dtype: Least precise dtype of the means.
        """
        zero = like.new_zeros((), dtype=torch.promote_types(like.dtype, dtype))
        width, weights = like.shape[-1], expert_weights or {}
        is_few = bool(weights) and outputs_are_few(sum(map(len, weights.values())), width)
        self._alpha = mix_alpha
        self._weights = {
            name: weight.to(zero.dtype).contiguous()
            for name, weight in weights.items()
            if is_few and mix_alpha > 0
        }
        self._mean_dtype = torch.promote_types(zero.dtype, mean_dtype)
        self._rounding = gram_rounding(like.dtype, zero.dtype)
        self.gram = zero.new_zeros(width, width)
        needs_cross = mix_alpha > 0 and not self._weights
        self.cross = zero.new_zeros(width, width) if needs_cross else None
        self.reached = {name: torch.zeros_like(w) for name, w in self._weights.items()}
        self.sum_cal, self.sum_shift = zero.new_zeros(width), zero.new_zeros(width)
        self.weight = zero.clone()

    def add(self, x_cal: Tensor, x_exp: Tensor | None, row_weights: Tensor | None) -> None:
        """Add rows, all of which count.

        Args:
            x_cal: Inputs in the calibrated model, `[n, d]`.
            x_exp: Inputs of the same rows in the expert; None where alpha is 0.
            row_weights: Weight of each row, `[n]`, finite and > 0: the host does not look at them.
                None: all weigh 1.

        Raises:
            ValueError: If shapes differ.
        """
        if x_exp is not None and x_cal.shape != x_exp.shape:
            raise ValueError(
                f"inputs must be two [n, d] of one shape, got {tuple(x_cal.shape)} (calibrated) "
                f"and {tuple(x_exp.shape)} (expert)"
            )
        for start in range(0, len(x_cal), MOST_ROWS):
            rows = slice(start, start + MOST_ROWS)
            weights = None if row_weights is None else row_weights[rows].to(self.gram.dtype)
            expert = None if x_exp is None else x_exp[rows].to(self.gram.dtype)
            self._absorb(x_cal[rows].to(self.gram.dtype), expert, weights)

    def _absorb(self, x_cal: Tensor, x_exp: Tensor | None, weights: Tensor | None) -> None:
        shift = None if x_exp is None else x_exp - x_cal
        self.weight += len(x_cal) if weights is None else weights.sum()
        for total, rows in ((self.sum_cal, x_cal), (self.sum_shift, shift)):
            if rows is not None:
                total += rows.sum(0) if weights is None else weights @ rows
        # Roots on both sides: a gram stays one, however it is rounded.
        roots = None if weights is None else weights.sqrt()[:, None]
        x_cal = x_cal if roots is None else x_cal * roots
        shift = shift if roots is None or shift is None else shift * roots
        columns = columns_of(x_cal)
        add_lower_gram(self.gram, columns)
        if shift is None:
            return
        if self.cross is not None:
            add_product(self.cross, columns, columns_of(shift))
        if self.reached:
            target = torch.add(x_cal, shift, alpha=self._alpha)
            for name, weight in self._weights.items():
                add_product(
                    self.reached[name], columns_of(times_transposed(target, weight)), columns
                )

    def not_finite(self) -> Tensor:
        """1 where a sum is NaN or infinite, else 0, a scalar."""
        return torch.stack([not_finite(part) for part in self.tensors()[3:]]).any()

    def tensors(self) -> list[Tensor]:
        """The sums, to which those of further rows may be added in place, in a fixed order."""
        cross = [] if self.cross is None else [self.cross]
        vectors = [self.weight, self.sum_cal, self.sum_shift]
        return [*vectors, self.gram, *cross, *self.reached.values()]

    def means(self) -> "TaskMeans":
        """Means over all rows. The sums are used up: this ends them."""
        dtype = self._mean_dtype
        total = self.weight.to(dtype)
        mean_cal = self.sum_cal.to(dtype) / total
        cross = None if self.cross is None else self.cross.to(dtype)
        return TaskMeans(
            gram=self.gram.to(dtype).div_(total),
            shift=None if cross is None else cross.mul_(self._alpha / total),
            reached={name: sums.to(dtype).div_(total) for name, sums in self.reached.items()},
            mean_cal=mean_cal,
            mean_target=mean_cal + self._alpha * (self.sum_shift.to(dtype) / total),
            rounding=self._rounding,
        )


@dataclass(frozen=True, kw_only=True)
class TaskMeans:
    """Means over one task's rows of the inputs that some linear modules share.

    Attributes:
        gram: `G`, `[d, d]`, symmetric; only its lower triangle is looked at.
        shift: `(C - G)' = alpha mean(x_cal (x_exp - x_cal)')`, `[d, d]`; None: zero, or not needed.
        reached: `W_i C` of each module, `[m, d]` by name, where it was summed itself.
        mean_cal: `mu_cal`, `[d]`.
        mean_target: `mu_tgt`, `[d]`.
        rounding: Rounding of the gram, relative to its diagonal.
    """

    gram: Float[Tensor, "d d"]
    shift: Float[Tensor, "d d"] | None
    reached: Mapping[str, Tensor]
    mean_cal: Float[Tensor, " d"]
    mean_target: Float[Tensor, " d"]
    rounding: float


def gram_rounding(features: torch.dtype, sums: torch.dtype) -> float:
    """Rounding of a Gram matrix, relative to its diagonal.

    The rounding of float32 features fills a direction that they lack with their rounding's square,
    which float64 sums resolve. Half-precision features are taken as the numbers they are.
    """
    of_sums = torch.finfo(sums).eps
    return of_sums if features.itemsize < 4 else max(of_sums, torch.finfo(features).eps ** 2)


def normalised_input(x: Tensor, eps: float) -> Tensor:
    """Normalised input of a LayerNorm, before its gain and shift (Eq. 56).

    Args:
        x: Rows `[n, d]`, any floating dtype.
        eps: The LayerNorm's own epsilon.

    Returns:
        `(x - mean) / sqrt(var + eps)` of each row, `[n, d]`, in float32 or better.
    """
    x = x.to(moment_dtype(x.dtype))
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)


def normalised_channels(x: Tensor, groups: int, eps: float) -> Tensor:
    """Normalised input of a GroupNorm, before its gain and shift.

    Args:
        x: `[batch, d, ...]`, any floating dtype.
        groups: Groups of channels that are normalised together.
        eps: The GroupNorm's own epsilon.

    Returns:
        The same shape, in float32 or better.
    """
    return torch.nn.functional.group_norm(x.to(moment_dtype(x.dtype)), groups, eps=eps)


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
