"""FeatCal as a FusionBench method."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fusion_bench_featcal.fusionbench.featcal import FeatCal
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.post_merging_algorithm import PostMergingAlgorithm
from fusion_bench_featcal.fusionbench.run_settings import (
    RunSettings,
    SelectedModels,
    pool_defaults,
    select_models,
)


class FeatCalAlgorithm(PostMergingAlgorithm):
    """Merges with any FusionBench method, calibrates, and evaluates the requested models.

    Run by `fusion_bench method=featcal modelpool=...`. In Python, `run(modelpool)` returns the
    calibrated model.

    Attributes:
        settings: Settings of the calibration.
        run_settings: Settings of the run: the merger, presets, and the model to save.
    """

    settings_classes = (FeatCal, RunSettings)
    shares_processes = True

    def __init__(self, **keys: Any) -> None:
        """Check all settings before any model is loaded.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        super().__init__(**keys)
        self.settings: FeatCal = self.settings_objects[0]
        self.run_settings: RunSettings = self.settings_objects[1]

    @cached_property
    def _selected_models(self) -> SelectedModels[FeatCal]:
        """Models that the run calibrates, evaluates and saves, by its or the pool's settings."""
        return select_models(self.settings, self.run_settings, pool_defaults(self._program))

    @property
    def methods(self) -> Mapping[str, FeatCal]:  # type: ignore[override]
        """Name of each model -> its calibration. The first one has the run's own settings."""
        return self._selected_models.rows

    @property
    def model_to_save(self) -> str:
        """Name of the model that is saved and returned."""
        return self._selected_models.save

    @property
    def references(self) -> Sequence[str]:
        """Reference models to evaluate."""
        return self._selected_models.compare_with

    def open(self, inputs: MethodInputs) -> None:
        """Open models and data of all calibrations. The first is charged the merger's reads.

        Raises:
            CalibrationError: As the base class, or if the merger's reads exceed the read budget.
        """
        super().open(inputs)
        if inputs.upstream is not None:
            inputs.charged_method = self.settings
            inputs.upstream.budget_left(self.settings)  # raises if nothing is left
