"""FeatCal as a FusionBench method."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fusion_bench_featcal.fusionbench.driver import RowsMethod
from fusion_bench_featcal.fusionbench.featcal import FeatCal
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.run_settings import (
    RunSettings,
    SelectedModels,
    pool_defaults,
    select_models,
)


class FeatCalAlgorithm(RowsMethod):
    """Merges with any FusionBench method, calibrates, and evaluates the requested models.

    Run by `fusion_bench method=featcal modelpool=...`. In Python, `run(modelpool)` returns the
    calibrated model.

    Attributes:
        settings: The method's own row, which is its settings.
        run_settings: Those of the run around it.
    """

    setting_kinds = (FeatCal, RunSettings)
    shares_processes = True

    def __init__(self, **keys: Any) -> None:
        """Check all settings before any model is loaded.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        super().__init__(**keys)
        self.settings: FeatCal = self.declared[0]
        self.run_settings: RunSettings = self.declared[1]

    @cached_property
    def _selected_models(self) -> SelectedModels[FeatCal]:
        """The further models that the run makes, by its settings or the model pool's."""
        return select_models(self.settings, self.run_settings, pool_defaults(self._program))

    @cached_property
    def rows(self) -> Mapping[str, FeatCal]:  # type: ignore[override]
        """Row -> its calibration, the method's own first."""
        return self._selected_models.rows

    def open(self, inputs: MethodInputs) -> None:
        """Open models and data of all rows. The first row's reads include the upstream merger's."""
        super().open(inputs)
        if inputs.upstream is not None:
            next(iter(self.rows.values())).charge_upstream_reads(inputs.upstream)

    @property
    def saved(self) -> str:
        """The row to save and return."""
        return self._selected_models.save

    @property
    def references(self) -> Sequence[str]:
        """Reference rows to evaluate."""
        return self._selected_models.compare_with
