"""Ridge surgery: how much of Surgery's gain needs training."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.lab.rivals.correction_modules import AffineModule
from fusion_bench_featcal.lab.rivals.corrections import (
    ClosedFormCorrection,
    CorrectionData,
    FittedCorrections,
)
from fusion_bench_featcal.settings.fields import setting

log = logging.getLogger(__name__)

GRID = tuple(10.0 ** (exponent / 2) for exponent in range(-8, 5))
"""Values of `ridge_lambda` that `auto` tries: 1e-4 to 1e2, two per decade."""


class RidgeSurgery(ClosedFormCorrection, option="ridge_surgery", source="ours"):
    """Ridge surgery: an affine correction of each task's final feature in closed form.

    Nothing is trained. It needs the task's name at inference.
    """

    ridge_lambda: float | str = setting(
        "auto",
        "Strength of the pull towards no correction, relative to the features' mean variance. "
        "`auto`: the value of a grid with the smallest leave-one-out error, which needs at least "
        "two samples per task.",
        ge=0,
        choices=("auto",),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ridge_lambda == "auto" and self.samples_per_task < 2:
            raise ValueError(
                "method.ridge_lambda=auto leaves one sample out: method.samples_per_task must be "
                f">= 2, got {self.samples_per_task}. Raise it, or set method.ridge_lambda to a "
                "number"
            )

    def fit_all(self, training_data: Mapping[str, CorrectionData]) -> FittedCorrections:
        """Fit each task's affine correction. Raises as `fit`."""
        data = training_data.items()
        return {task: [self.fit(one.inputs, one.targets[0], task)] for task, one in data}, {}

    def fit(self, merged: Tensor, expert: Tensor, task: str = "") -> AffineModule:
        """Fit an affine correction: ridge regression of the drift on merged features, in float64.

        With x and e the features of the merged model and the expert it minimises `sum |(x - e) - (A
        x + b)|^2 + lambda n v |A|^2`, with v the mean variance of x's coordinates and b not
        penalised. With a large lambda only the mean drift is removed.

        Args:
            merged: Features of the merged model, `[n, d]`.
            expert: Features of the task's expert on the same samples, `[n, d]`.
            task: The task's name, for messages.

        Raises:
            CalibrationError: If features do not vary, or `auto` has fewer than two samples.
        """
        features, samples = merged.double(), len(merged)
        drift = features - expert.double()
        centred, centred_drift = features - features.mean(dim=0), drift - drift.mean(dim=0)
        left_vectors, values, right_vectors = torch.linalg.svd(centred, full_matrices=False)
        strength, varies = self.ridge_lambda, bool(values.max() > 1e-12 * features.norm())
        if (samples > 1 and not varies) or (samples < 2 and isinstance(strength, str)):
            raise CalibrationError(
                f"task {task!r}: the merged model's features do not vary (samples: {samples}). "
                "Check its dataset, raise method.samples_per_task or set method.ridge_lambda to a "
                "number"
            )
        # Below rounding a direction has no information: one sample, or repeated samples.
        values = torch.where(values > values.max() * 1e-7, values, 0)
        target = left_vectors.T @ centred_drift
        power, scale = values.square(), centred.square().sum() / features.shape[1]

        def share(strength: float) -> Tensor:
            """Return the shrinkage factor of each direction, 0 without energy."""
            return torch.nan_to_num(power / (power + strength * scale))

        def left_out_error(strength: float) -> float:
            """Sum squared leave-one-out residuals: residuals times 1 / (1 - leverage)."""
            residual = centred_drift - left_vectors * share(strength) @ target
            leverage = 1 / samples + (left_vectors.square() * share(strength)).sum(dim=1)
            return float((residual / (1 - leverage)[:, None]).square().sum())

        if isinstance(strength, str):
            strength = min(GRID, key=left_out_error)
        inverse = torch.where(values > 0, share(strength) / values, 0)
        matrix = (right_vectors.T * inverse @ target).T
        shift = drift.mean(dim=0) - matrix @ features.mean(dim=0)
        log.info("%s: ridge surgery with lambda %g", task, strength)
        module = AffineModule(matrix.to(merged.dtype), shift.to(merged.dtype))
        return module.requires_grad_(False)
