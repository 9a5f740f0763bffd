"""BatchNorm's statistics alone, estimated again: what REPAIR (arXiv 2211.08403) does to a merge."""

from typing import Any, ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.families import check_family, resolve_family
from fusion_bench_featcal.fusionbench.options import checked_settings
from fusion_bench_featcal.fusionbench.pool_configs import check_pool_settings
from fusion_bench_featcal.methods.interface import MethodInputs, WeightsOnly
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

BATCH_NORM_SETTINGS = ("samples_per_task", "batch_size", "seed", "calibration_split", "family")
"""Fields of `FeatCalSettings` that re-estimated statistics depend on."""


class BatchNormStatistics(WeightsOnly):
    """Gives a merged model the statistics of its own features; no parameter changes.

    All tasks weigh the same, and each BatchNorm sees what those before it give with their new
    statistics. Its settings are `BATCH_NORM_SETTINGS`.
    """

    name: ClassVar = "batch_norm_statistics"
    _config_mapping: ClassVar = {name: name for name in BATCH_NORM_SETTINGS}

    def __init__(self, **settings: Any) -> None:
        """Check the settings; a ValueError names one that is unknown or out of range."""
        self._settings = checked_settings(
            settings, names=BATCH_NORM_SETTINGS, owner="BatchNorm's statistics"
        )
        self._drawn: dict[str, int] = {}
        check_family(self._settings.family)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        values = self._settings.as_dict()
        return {name: values[name] for name in BATCH_NORM_SETTINGS}

    def check(self, inputs: MethodInputs) -> None:
        """Open the calibration data; a CalibrationError names what is missing."""
        check_pool_settings(inputs.models, self._settings)
        inputs.batches(self._settings)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Return a copy of the merged model with new statistics.

        Raises:
            CalibrationError: If it has no BatchNorm in its blocks, or the run cannot go on.
        """
        settings = statistics_only(merged, self._settings)
        result = calibrate(
            merged,
            None,
            inputs.experts(settings),
            inputs.batches(settings),
            settings,
            device=inputs.fabric.device,
            autocast=inputs.fabric.autocast,
        )
        self._drawn = {record["task"]: record["samples"] for record in result.log.of_kind("task")}
        return result.model


def statistics_only(merged: nn.Module, settings: FeatCalSettings) -> FeatCalSettings:
    """Settings of a calibration in which only BatchNorm's statistics change, and no expert runs.

    Raises:
        CalibrationError: If the model has no BatchNorm in its blocks.
    """
    family = resolve_family(settings.family, merged)
    shown = family.view.shown(merged)
    blocks = [block for stage in family.stages(shown) for block in stage]
    norms = [
        name
        for block in blocks
        for name, module in shown.get_submodule(block).named_modules(prefix=block)
        if isinstance(module, _BatchNorm) and module.track_running_stats
    ]
    if not norms:
        raise CalibrationError(
            f"{type(merged).__name__} has no BatchNorm in its blocks (method.family="
            f"{family.name}), so there are no statistics to estimate: leave this method out"
        )
    return settings.replace(
        modules=norms, calibrate_norm=False, mix_alpha=0.0, anchor_rho=1.0, log_drift=False
    )
