"""Ridge surgery: the best affine correction of a task's features, in closed form.

It asks how much of Surgery is its training: same features, same place, no steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_bench_featcal.lab.rivals.corrected_model import AffineModule
from fusion_bench_featcal.lab.rivals.feature_correction import FeatureCorrection, check_features
from fusion_bench_featcal.lab.rivals.registry import method
from fusion_bench_featcal.setting_fields import setting
from fusion_bench_featcal.settings import CalibrationError

GRID = tuple(10.0 ** (exponent / 2) for exponent in range(-8, 5))
"""Values of `ridge_lambda` that `auto` tries: 1e-4 to 1e2, two a decade."""


@method("ridge_surgery", source="ours")
class RidgeSurgery(FeatureCorrection):
    """Ridge surgery: an affine correction of each task's final feature in closed form.

    There is no training. It needs the task's name at inference.
    """

    ridge_lambda: float | str = setting(
        "auto",
        "Pull towards no correction, relative to the features' mean variance. `auto`: the value "
        "of a grid with the least leave-one-out error, which takes two samples per task.",
        ge=0,
        choices=("auto",),
        group="module and fit",
    )
    stream: str = setting(
        "calibration",
        "`calibration` fits on samples that FeatCal draws, `test_tta` on those of the test split.",
        choices=("test_tta", "calibration"),
        group="data",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ridge_lambda == "auto" and self.samples_per_task < 2:
            raise ValueError(
                "method.ridge_lambda=auto leaves one sample out: method.samples_per_task must be "
                f">= 2, got {self.samples_per_task}; or set method.ridge_lambda to a number"
            )

    def fit(
        self, merged: Tensor, expert: Tensor, task: str = "", losses: list[Tensor] | None = None
    ) -> AffineModule:
        """Fit one task's affine correction: ridge regression of the drift on the merged features.

        With x and e the features of the merged model and the expert it minimises
        `sum |(x - e) - (A x + b)|^2 + lambda n v |A|^2`, v the mean variance of x's coordinates; b
        is free. A large lambda leaves only the mean drift to be removed. It is solved in float64.

        Raises:
            CalibrationError: If the features do not fit each other, do not vary, or `auto` has
                fewer than two samples.
        """
        check_features(merged, expert, task)
        features = merged.detach().double()
        drift = features - expert.detach().double()
        spectrum = _spectrum(features, drift, task)
        strength = self.ridge_lambda
        if isinstance(strength, str):
            strength = _least_left_out(spectrum, task)
        # Directions of energy zero have shrinkage 0/0 without a ridge: they are not fitted.
        share = torch.nan_to_num(spectrum.shrinkage(strength))
        inverse = torch.where(spectrum.values > 0, share / spectrum.values, 0)
        matrix = (spectrum.right * inverse @ spectrum.target).T
        shift = drift.mean(dim=0) - matrix @ features.mean(dim=0)
        return AffineModule(matrix.to(merged.dtype), shift.to(merged.dtype)).eval()


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
