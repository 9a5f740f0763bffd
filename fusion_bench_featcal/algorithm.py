"""FeatCal as a FusionBench method."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.fusionbench.driver import RowsMethod
from fusion_bench_featcal.fusionbench.featcal import FeatCal
from fusion_bench_featcal.fusionbench.options import (
    Choices,
    RunSettings,
    checked_choices,
    suite_of,
)
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.rules import rule_of


class FeatCalAlgorithm(RowsMethod):
    """Merges with any FusionBench method, calibrates, and evaluates the requested models.

    Run by `fusion_bench method=featcal modelpool=...`. In Python, `run(modelpool)` returns the
    calibrated model.

    Attributes:
        settings: Those of the calibration.
        run_settings: Those of the run around it.
    """

    setting_kinds = (FeatCalSettings, RunSettings)
    shares_processes = True

    def __init__(self, **keys: Any) -> None:
        """Check all settings before any model is loaded.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        super().__init__(**keys)
        self.settings: FeatCalSettings = self.declared[0]
        self.run_settings: RunSettings = self.declared[1]
        check_family(self.settings.family)
        rule_of(self.settings)

    @cached_property
    def _choices(self) -> Choices:
        """The further models that the run makes, by its settings or the model pool's."""
        return checked_choices(self.settings, self.run_settings, suite_of(self._program))

    @cached_property
    def rows(self) -> Mapping[str, FeatCal]:  # type: ignore[override]
        """Row -> its calibration, the method's own first."""
        rows = self._choices.rows(self.settings)
        return {name: FeatCal.of(settings) for name, settings in rows.items()}

    @property
    def saved(self) -> str:
        """The row to save and return."""
        return self._choices.save

    @property
    def references(self) -> Sequence[str]:
        """Reference rows to evaluate."""
        return self._choices.compare_with
