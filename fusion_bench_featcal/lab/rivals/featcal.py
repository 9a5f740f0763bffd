"""FeatCal as a post-merging method on a model pool."""

from typing import Any

from torch import nn

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.fusionbench.inputs import MethodInputs, check_calibration
from fusion_bench_featcal.lab.rivals.method import Method
from fusion_bench_featcal.rules import completed
from fusion_bench_featcal.settings import FeatCalSettings


class FeatCal(FeatCalSettings, Method):
    """Calibrates a merged model. Its settings are the calibration's settings."""

    name = "featcal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint_dir is not None or self.calibration_data is not None:
            raise ValueError("checkpoint_dir and calibration_data are settings of method=featcal")

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """All settings."""
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, fit for JSON."""
        return completed(self).as_dict()

    def check(self, inputs: MethodInputs) -> None:
        """Open the data and check models, base and read budget. Raises as `check_calibration`."""
        check_calibration(self, inputs)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Calibrate the merged model. Raises a CalibrationError if that cannot go on."""
        options = {"device": inputs.fabric.device, "autocast": inputs.fabric.autocast}
        batches = inputs.batches(self)
        result = calibrate(merged, inputs.base(), inputs.experts(), batches, self, **options)
        self.sample_counts.update((r["task"], r["samples"]) for r in result.log.of_kind("task"))
        return result.model
