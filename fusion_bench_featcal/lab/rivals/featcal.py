"""FeatCal as a post-merging method on a model pool."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.lab.rivals.registry import Method
from fusion_bench_featcal.method_inputs import MethodInputs, check_calibration
from fusion_bench_featcal.problem import CalibrationResult
from fusion_bench_featcal.settings import FeatCalSettings

_OF_A_RUN = {
    "checkpoint_dir": "a comparison keeps whole cells, in method.results_dir; blocks are kept by "
    "method=featcal",
    "calibration_data": "a comparison's methods share the pool's data: set "
    "modelpool.train_datasets",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatCal(FeatCalSettings, Method):
    """Calibrates a merged model. Its settings are the calibration's settings."""

    name = "featcal"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_family(self.family)
        for key, reason in _OF_A_RUN.items():
            if getattr(self, key) is not None:
                raise ValueError(f"{key}: {reason}")

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """All settings."""
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, fit for JSON."""
        return self.as_dict()

    def check(self, inputs: MethodInputs) -> None:
        """Open the data and check models, base and read budget. Raises as `check_calibration`."""
        check_calibration(self, inputs)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Calibrate the merged model.

        Raises:
            CalibrationError: If the calibration cannot go on.
        """
        return calibrated(self, merged, inputs, self).model


def calibrated(
    method: Method, merged: nn.Module, inputs: MethodInputs, settings: FeatCalSettings
) -> CalibrationResult:
    """Calibrate a merged model for a method, and store the numbers of samples in it.

    Raises:
        CalibrationError: If the calibration cannot go on.
    """
    result = calibrate(
        merged,
        inputs.base(settings),
        inputs.experts(settings),
        inputs.batches(settings),
        settings,
        device=inputs.fabric.device,
        autocast=inputs.fabric.autocast,
    )
    method.note_samples(result.log)
    return result
