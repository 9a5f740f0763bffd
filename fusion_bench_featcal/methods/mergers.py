"""RegMean, RegMean++ and LOT Merging on the experts and samples of a model pool."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import nn

from fusion_bench_featcal.calibration_data import samples_used
from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.fusionbench.options import checked_settings
from fusion_bench_featcal.fusionbench.pool_configs import check_pool_settings
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.methods.blockwise import LeastSquares, lot, regmean, regmean_plusplus
from fusion_bench_featcal.methods.interface import MethodInputs
from fusion_bench_featcal.settings import FeatCalSettings

MERGER_SETTINGS = (
    "samples_per_task",
    "batch_size",
    "seed",
    "calibration_split",
    "modules",
    "family",
    "ignore_config",
    "stream_experts",
)
"""Fields of `FeatCalSettings` that the mergers have too, with the same meaning."""


class Merger:
    """A merger that starts from the pool's experts; a subclass names its function and options."""

    name: ClassVar[str]
    function: ClassVar[Callable[..., nn.Module]]
    older_names: ClassVar = ()
    options: ClassVar[dict[str, Any]] = {}  # name -> default, of the function's own
    _config_mapping: ClassVar[dict[str, str]]

    def __init_subclass__(cls) -> None:
        cls._config_mapping = {name: name for name in (*cls.options, *MERGER_SETTINGS)}

    def __init__(self, **keys: Any) -> None:
        """Check the settings.

        Args:
            **keys: `MERGER_SETTINGS` and the function's own options.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        self._options = {name: keys.pop(name, default) for name, default in self.options.items()}
        self._settings: FeatCalSettings = checked_settings(
            keys, names=MERGER_SETTINGS, others=tuple(self.options), owner=self.name
        )
        check_family(self._settings.family)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        values = self._settings.as_dict()
        return self._options | {name: values[name] for name in MERGER_SETTINGS}

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a pool without a base, and models that the settings do not fit.

        Raises:
            CalibrationError: If there is no base, or a model is of another kind than the others.
        """
        inputs.require_base("is needed for its structure")
        check_pool_settings(inputs.modelpool, self._settings)

    def merge(self, inputs: MethodInputs) -> nn.Module:
        """Merge the pool's experts.

        Raises:
            CalibrationError: If models or data are missing, or the merging cannot go on.
        """
        batches = inputs.batches(self._settings)
        return type(self).function(
            load_pool_model(inputs.modelpool, BASE_MODEL),
            inputs.experts(self._settings),
            batches,
            self._settings,
            device=inputs.fabric.device,
            autocast=inputs.fabric.autocast,
            **self._options,
        )

    def samples(self, inputs: MethodInputs, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Task -> {"samples": number, "split": name} of the data that merging uses."""
        number, split = self._settings.samples_per_task, self._settings.calibration_split
        return samples_used(inputs.modelpool, tasks, number, split)


class RegMean(Merger):
    """RegMean on FeatCal's samples, for any model family."""

    name = "regmean"
    function = staticmethod(regmean)
    options: ClassVar = {"off_diagonal": 0.95, "task_weights": "equal"}

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        LeastSquares(stream="expert", anchor="mean", **self._options)  # checks them


class RegMeanPlusPlus(RegMean):
    """RegMean++ on FeatCal's samples, for any model family."""

    name = "regmean_plusplus"
    function = staticmethod(regmean_plusplus)


class Lot(Merger):
    """LOT Merging on FeatCal's samples, for any model family."""

    name = "lot"
    function = staticmethod(lot)
