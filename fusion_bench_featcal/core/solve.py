"""Closed-form updates of weight, bias and LayerNorm affine (Eqs. 11, 17, 51-59).

These functions are the definition of FeatCal's update. They take whole statistics of every task;
`core.folded` computes the same from running sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.cholesky import (
    check_residual,
    factorise,
    ridge_system,
    solve_dtype,
    solve_factorised,
)
from fusion_bench_featcal.core.moments import LinearMoments, NormMoments, task_weight

Affine = tuple[Tensor, Tensor]
"""Gain and shift of a LayerNorm, `[d]` each."""


@dataclass(frozen=True, kw_only=True)
class LinearSolution:
    """Solution of one linear module (Eq. 17).

    Attributes:
        weight: `W*`, `[m, d]`, in the solve's dtype.
        task_weights: `w_i` of each task (Eq. 14), scalars.
        residual: `|W* A - R|_F / |R|_F` of the system that was solved, estimated.
        condition: Estimate of the system's condition number, by power iterations.
    """

    weight: Float[Tensor, "m d"]
    task_weights: dict[str, Tensor]
    residual: float
    condition: float


def extrapolate_anchor(merged: Tensor, base: Tensor | None, anchor_rho: float) -> Tensor:
    """Anchor `rho W_mer + (1 - rho) W_base` (Eq. 11).

    Args:
        merged: Parameter of the merged model, any shape.
        base: The base's parameter, same shape; None is allowed where `anchor_rho` is 1.
        anchor_rho: rho, any real number.

    Returns:
        The anchor in the solve's dtype.

    Raises:
        ValueError: If the base is missing and `anchor_rho` is not 1.
    """
    wide = solve_dtype(merged.device)
    merged = merged.to(wide)
    if anchor_rho == 1:
        return merged
    if base is None:
        raise ValueError(f"anchor_rho = {anchor_rho} needs the base model; without one set it to 1")
    base = base.to(wide)
    return base + anchor_rho * (merged - base)


def solve_linear(
    moments: Mapping[str, LinearMoments],
    expert_weights: Mapping[str, Tensor],
    anchor: Tensor,
    *,
    mix_alpha: float,
    ridge_lambda: float,
    eps: float,
) -> LinearSolution:
    """Calibrated weight of one linear module (Eq. 17).

    `W* = (sum_i w_i W_i C_i + lambda W_anc) (sum_i w_i G_i + lambda I + eps I)^-1`, solved for
    the difference to the anchor, which makes the no-op case exact.

    Args:
        moments: Each task's sums.
        expert_weights: Each expert's weight `W_i`, `[m, d]`.
        anchor: `W_anc`, `[m, d]`, from `extrapolate_anchor`.
        mix_alpha: alpha (Eq. 10), 0 to 1.
        ridge_lambda: lambda, >= 0.
        eps: Stabiliser of the matrix and floor of the norms.

    Returns:
        The solution, in float64 where the device has it.

    Raises:
        UnsolvedError: If the system has no trustworthy solution.
        KeyError: If a task has moments but no expert weight.
    """
    wide = solve_dtype(anchor.device)
    anchor = anchor.to(wide)
    weights = {task: task_weight(m, eps).to(wide) for task, m in moments.items()}
    gram = anchor.new_zeros(anchor.shape[1], anchor.shape[1])
    right = -eps * anchor
    for task, m in moments.items():
        mean_gram = m.gram.to(wide) / m.weight.to(wide)
        reached = expert_weights[task].to(wide) @ m.cross(mix_alpha).to(wide)
        gram += weights[task] * mean_gram
        right += weights[task] * (reached - anchor @ mean_gram)
    system = ridge_system(gram, ridge_lambda=ridge_lambda, eps=eps, dtype=wide)
    rounding = torch.finfo(next(iter(moments.values())).gram.dtype).eps
    factor, condition = factorise(system, floor=ridge_lambda + eps, rounding=rounding)
    step, estimate = solve_factorised(factor, system, right)
    residual = float(estimate)
    check_residual(residual, wide)
    return LinearSolution(
        weight=anchor + step, task_weights=weights, residual=residual, condition=condition
    )


def solve_bias(
    moments: Mapping[str, LinearMoments],
    expert_weights: Mapping[str, Tensor],
    expert_biases: Mapping[str, Tensor],
    weight: Tensor,
    task_weights: Mapping[str, Tensor],
    anchor: Tensor | None,
    *,
    mix_alpha: float,
    ridge_lambda: float,
) -> Float[Tensor, " m"]:
    """Calibrated bias, given the calibrated weight (Eqs. 51-55).

    Args:
        moments: Each task's sums.
        expert_weights: Each expert's weight, `[m, d]`.
        expert_biases: Each expert's bias, `[m]`.
        weight: `W*`, `[m, d]`.
        task_weights: `w_i` of each task, from `solve_linear`.
        anchor: `b_anc`, `[m]`; None (no base): the lambda term is dropped on both sides.
        mix_alpha: alpha (Eq. 10).
        ridge_lambda: lambda, >= 0.

    Returns:
        `b*`, `[m]`, in the solve's dtype.
    """
    wide = solve_dtype(weight.device)
    weight = weight.to(wide)
    pull = 0.0 if anchor is None else ridge_lambda
    right = weight.new_zeros(weight.shape[0]) if anchor is None else pull * anchor.to(wide)
    total = weight.new_tensor(pull)
    for task, m in moments.items():
        mean_cal = m.sum_cal.to(wide) / m.weight.to(wide)
        mean_exp = m.sum_exp.to(wide) / m.weight.to(wide)
        target = mix_alpha * mean_exp + (1 - mix_alpha) * mean_cal
        wanted = expert_biases[task].to(wide) + expert_weights[task].to(wide) @ target
        right = right + task_weights[task].to(wide) * (wanted - weight @ mean_cal)
        total = total + task_weights[task].to(wide)
    return right / total


def solve_affine(
    second: Tensor,
    first: Tensor,
    tasks: int,
    right_gain: Tensor,
    right_shift: Tensor,
    anchor: Affine | None,
    *,
    ridge_lambda: float,
    eps: float,
) -> Affine:
    """Solve the 2x2 system of each channel from its sums over tasks (Eqs. 57-59).

    Args:
        second: `sum_i q_i`, `[d]`.
        first: `sum_i zbar_i`, `[d]`.
        tasks: Number of tasks.
        right_gain: `sum_i (q_i g_i + zbar_i be_i)`, `[d]`.
        right_shift: `sum_i (zbar_i g_i + be_i)`, `[d]`.
        anchor: Anchor gain and shift, or None: lambda is dropped on both sides.
        ridge_lambda: lambda, >= 0.
        eps: Lower bound of the determinant.

    Returns:
        Gain and shift, `[d]` each.
    """
    pull = 0.0 if anchor is None else ridge_lambda
    a11, a12, a22 = second + pull, first, tasks + pull
    if anchor is not None:
        right_gain = right_gain + pull * anchor[0].to(second.dtype)
        right_shift = right_shift + pull * anchor[1].to(second.dtype)
    determinant = (a22 * a11 - a12 * a12).clamp_min(eps)
    gain = (a22 * right_gain - a12 * right_shift) / determinant
    shift = (a11 * right_shift - a12 * right_gain) / determinant
    return gain, shift


def solve_norm(
    moments: Mapping[str, NormMoments],
    expert_affines: Mapping[str, Affine],
    anchor: Affine | None,
    *,
    ridge_lambda: float,
    eps: float,
) -> Affine:
    """Calibrated gain and shift of a LayerNorm, channel by channel (Eqs. 56-59).

    All tasks weigh the same and only features of the calibrated model enter.

    Args:
        moments: Each task's sums of normalised inputs.
        expert_affines: Each expert's gain and shift, `[d]` each.
        anchor: Anchor gain and shift, or None (no base): lambda is dropped on both sides.
        ridge_lambda: lambda, >= 0.
        eps: Lower bound of each channel's determinant.

    Returns:
        Gain and shift, `[d]` each, in the solve's dtype.
    """
    device = next(iter(moments.values())).sum_z.device
    wide = solve_dtype(device)
    second = first = right_gain = right_shift = torch.zeros((), dtype=wide, device=device)
    for task, m in moments.items():
        q = m.sum_z_sq.to(wide) / m.weight.to(wide)
        mean = m.sum_z.to(wide) / m.weight.to(wide)
        gain, shift = (part.to(wide) for part in expert_affines[task])
        second, first = second + q, first + mean
        right_gain = right_gain + q * gain + mean * shift
        right_shift = right_shift + mean * gain + shift
    return solve_affine(
        second,
        first,
        len(moments),
        right_gain,
        right_shift,
        anchor,
        ridge_lambda=ridge_lambda,
        eps=eps,
    )
