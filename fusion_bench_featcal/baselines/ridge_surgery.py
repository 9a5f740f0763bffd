"""Ridge surgery: the best affine correction of a task's features, in closed form.

It asks how much of Surgery is its training: same features, same place, no steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.baselines.settings import RidgeSurgerySettings
from fusion_bench_featcal.baselines.training import check_features
from fusion_bench_featcal.settings import CalibrationError

GRID = tuple(10.0 ** (exponent / 2) for exponent in range(-8, 5))
"""Values of `ridge_lambda` that `auto` tries: 1e-4 to 1e2, two a decade."""


class AffineModule(nn.Module):
    """One task's correction: `f - (A f + b)`.

    Attributes:
        matrix: A, `[d, d]`.
        shift: b, `[d]`.
    """

    def __init__(self, matrix: Tensor, shift: Tensor) -> None:
        """Take over matrix and shift, frozen."""
        super().__init__()
        self.matrix = nn.Parameter(matrix, requires_grad=False)
        self.shift = nn.Parameter(shift, requires_grad=False)

    def drift(self, features: Tensor) -> Tensor:
        """Correction to subtract from features `[..., d]`."""
        return functional.linear(features, self.matrix, self.shift)

    def forward(self, features: Tensor) -> Tensor:
        """Correct features `[..., d]`."""
        return features - self.drift(features)


@dataclass(frozen=True)
class _Spectrum:
    """Centred features as `left diag(values) right'`, and the centred drift in `left`'s basis."""

    left: Tensor
    values: Tensor
    right: Tensor
    target: Tensor
    drift: Tensor
    scale: Tensor

    def shrinkage(self, ridge_lambda: float) -> Tensor:
        """Share of each direction that is fitted, `[directions]`."""
        power = self.values.square()
        return power / (power + ridge_lambda * self.scale)


def fit_ridge_surgery(
    merged_features: Tensor,
    expert_features: Tensor,
    settings: RidgeSurgerySettings,
    *,
    task: str = "",
) -> AffineModule:
    """Fit one task's affine correction: ridge regression of the drift on the merged features.

    With x and e the features of the merged model and the expert it minimises
    `sum |(x - e) - (A x + b)|^2 + lambda n v |A|^2`, v the mean variance of x's coordinates; b is
    free. A large lambda leaves only the mean drift to be removed.

    Args:
        merged_features: Of the merged model, `[n, d]`.
        expert_features: Of the task's expert on the same samples, `[n, d]`.
        settings: `ridge_lambda` is used.
        task: The task's name, for messages.

    Returns:
        The correction, in the features' dtype and on their device; solved in float64.

    Raises:
        CalibrationError: If the features do not fit each other, do not vary, or `auto` has fewer
            than two samples.
    """
    check_features(merged_features, expert_features, task)
    features = merged_features.detach().double()
    drift = features - expert_features.detach().double()
    spectrum = _spectrum(features, drift, task)
    strength = settings.ridge_lambda
    if isinstance(strength, str):
        strength = _least_left_out(spectrum, task)
    # Directions of energy zero have shrinkage 0/0 without a ridge: they are not fitted.
    share = torch.nan_to_num(spectrum.shrinkage(strength))
    inverse = torch.where(spectrum.values > 0, share / spectrum.values, 0)
    matrix = (spectrum.right * inverse @ spectrum.target).T
    shift = drift.mean(dim=0) - matrix @ features.mean(dim=0)
    return AffineModule(matrix.to(merged_features.dtype), shift.to(merged_features.dtype)).eval()


def _spectrum(features: Tensor, drift: Tensor, task: str) -> _Spectrum:
    centred = features - features.mean(dim=0)
    left, values, right = torch.linalg.svd(centred, full_matrices=False)
    # Below rounding a direction holds no information: one sample, or repeated ones.
    values = torch.where(values > values.max() * 1e-7, values, 0)
    if len(features) > 1 and not bool(values.max() > 1e-12 * features.norm()):
        raise CalibrationError(
            f"task {task!r}: the merged model's features do not vary over its {len(features)} "
            "samples. Check its data set and the merged model"
        )
    centred_drift = drift - drift.mean(dim=0)
    scale = centred.square().sum() / features.shape[1]
    return _Spectrum(left, values, right.T, left.T @ centred_drift, centred_drift, scale)


def left_out_errors(
    merged_features: Tensor, expert_features: Tensor, task: str = ""
) -> dict[float, float]:
    """Squared error on samples left out one at a time, summed, for every value of the grid.

    Args:
        merged_features: Of the merged model, `[n, d]`, n >= 2.
        expert_features: Of the task's expert on the same samples, `[n, d]`.
        task: The task's name, for messages.

    Returns:
        `ridge_lambda` -> error. The ridge's absolute strength is the full fit's throughout.
    """
    features = merged_features.detach().double()
    spectrum = _spectrum(features, features - expert_features.detach().double(), task)
    return {value: _left_out_error(spectrum, value) for value in GRID}


def _left_out_error(spectrum: _Spectrum, ridge_lambda: float) -> float:
    """Without refitting: left out, a sample has 1 / (1 - its leverage) times its residual."""
    share = torch.nan_to_num(spectrum.shrinkage(ridge_lambda))
    residual = spectrum.drift - spectrum.left * share @ spectrum.target
    leverage = 1 / len(spectrum.left) + (spectrum.left.square() * share).sum(dim=1)
    return float((residual / (1 - leverage)[:, None]).square().sum())


def _least_left_out(spectrum: _Spectrum, task: str) -> float:
    """The grid's value with the least error on samples left out."""
    samples = len(spectrum.left)
    if samples < 2:
        raise CalibrationError(
            f"task {task!r} has {samples} sample, and method.ridge_lambda=auto leaves one out: "
            "raise method.samples_per_task or set method.ridge_lambda to a number"
        )
    return min(GRID, key=lambda value: _left_out_error(spectrum, value))
