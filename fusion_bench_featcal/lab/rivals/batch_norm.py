"""BatchNorm's statistics alone, estimated again: what REPAIR (arXiv 2211.08403) does to a merge."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.fusionbench.pool_configs import check_pool_settings
from fusion_bench_featcal.lab.rivals.interface import WeightsOnly
from fusion_bench_featcal.lab.rivals.registry import SampleSettings, method
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.setting_fields import same_as
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings


@method("featcal_baselines/batch_norm_statistics", source="REPAIR, arXiv 2211.08403")
class BatchNormStatistics(SampleSettings, WeightsOnly):
    """BatchNorm's running statistics of a merged model, estimated again on calibration samples.

    No parameter changes. All tasks weigh the same, and each BatchNorm receives what those before it
    give with their new statistics. FeatCal does it on the way (batch_norm=reestimate).
    """

    family: Any = same_as(FeatCalSettings, "family")

    def check(self, inputs: MethodInputs) -> None:
        """Open the calibration data; a CalibrationError names what is missing."""
        check_pool_settings(inputs.models, self.calibration_settings)
        inputs.batches(self.calibration_settings)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Return a copy of the merged model with new statistics.

        Raises:
            CalibrationError: If it has no BatchNorm in its blocks, or the run cannot go on.
        """
        settings = statistics_only(merged, self.calibration_settings)
        result = calibrate(
            merged,
            None,
            inputs.experts(settings),
            inputs.batches(settings),
            settings,
            device=inputs.fabric.device,
            autocast=inputs.fabric.autocast,
        )
        self.note_samples(result.log)
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
