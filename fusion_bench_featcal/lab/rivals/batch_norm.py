"""Re-estimated statistics of BatchNorm: REPAIR (arXiv 2211.08403) of a merged model."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.lab.rivals.featcal import calibrated
from fusion_bench_featcal.lab.rivals.registry import SampleSettings, method
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.setting_fields import same_as
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings


@method("featcal_baselines/batch_norm_statistics", source="REPAIR, arXiv 2211.08403")
class BatchNormStatistics(SampleSettings):
    """BatchNorm's running statistics of a merged model, re-estimated on calibration samples.

    No parameter changes. All tasks have equal weight, and each BatchNorm receives features that
    were normalised by the new statistics before it. FeatCal includes this (batch_norm=reestimate).
    """

    family: Any = same_as(FeatCalSettings, "family")

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Return a copy of the merged model with new statistics. No expert runs.

        Raises:
            CalibrationError: If it has no BatchNorm in its blocks, or the run cannot go on.
        """
        settings = self.calibration_settings.replace(
            modules=self._norms(merged),
            calibrate_norm=False,
            mix_alpha=0.0,
            anchor_rho=1.0,
            log_drift=False,
        )
        return calibrated(self, merged, inputs, settings).model

    def _norms(self, merged: nn.Module) -> list[str]:
        """Return the names of the BatchNorms in a model's blocks."""
        family = resolve_family(self.family, merged)
        viewed_model = family.view.arranged(merged)
        norms = [
            name
            for stage in family.stages(viewed_model)
            for block in stage
            for name, module in viewed_model.get_submodule(block).named_modules(prefix=block)
            if isinstance(module, _BatchNorm) and module.track_running_stats
        ]
        if not norms:
            raise CalibrationError(
                f"{type(merged).__name__} has no BatchNorm in its blocks (method.family="
                f"{family.name}), so there are no statistics to estimate: leave this method out"
            )
        return norms
