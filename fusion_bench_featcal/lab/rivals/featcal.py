"""FeatCal as a post-merging method on a model pool."""

from typing import Any, ClassVar

from torch import nn

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.fusionbench.options import checked_settings
from fusion_bench_featcal.lab.rivals.interface import Choice, WeightsOnly
from fusion_bench_featcal.method_inputs import MethodInputs, check_calibration
from fusion_bench_featcal.settings import FeatCalSettings


class FeatCal(WeightsOnly):
    """Calibrates a merged model; its settings are the fields of `FeatCalSettings`."""

    name: ClassVar = "featcal"
    _config_mapping: ClassVar = {name: name for name in FeatCalSettings.names()}

    def __init__(self, **settings: Any) -> None:
        """Check the settings.

        Args:
            **settings: Fields of `FeatCalSettings`.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        self._settings = checked_settings(settings)
        check_family(self._settings.family)
        if self._settings.checkpoint_dir is not None:
            raise ValueError(
                "checkpoint_dir: a comparison keeps whole cells, in method.results_dir; blocks are "
                "kept by method=featcal"
            )
        if self._settings.calibration_data is not None:
            raise ValueError(
                "calibration_data: a comparison's methods share the pool's data: set "
                "modelpool.train_datasets"
            )

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """All settings."""
        return self._settings

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        return self._settings.as_dict()

    def check(self, inputs: MethodInputs) -> None:
        """Open the calibration data; see that models fit and a base is there if anchors need it.

        Raises:
            CalibrationError: If data or base are missing, a model does not fit or a read budget
                cannot be kept.
            ValueError: If the family does not know the models.
        """
        check_calibration(self._settings, inputs)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Calibrate the merged model.

        Raises:
            CalibrationError: If the calibration cannot go on.
        """
        result = calibrate(
            merged,
            inputs.base(self._settings),
            inputs.experts(self._settings),
            inputs.batches(self._settings),
            self._settings,
            device=inputs.fabric.device,
            autocast=inputs.fabric.autocast,
        )
        self.note_samples(result.log)
        model: Any = result.model
        for record in result.log.of_kind("drift_weights"):
            change = {"task_weights": record["weights"]} if record["kept"] else {}
            model.choice = Choice.of(2, change)
        return model
