"""FeatCal's anchor alone: the limit of calibration for large lambda, without data."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, source_of
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.lab.rivals.registry import Method, method
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.module_copies import copied_module
from fusion_bench_featcal.modules.models import refuse_not_finite
from fusion_bench_featcal.modules.sites import find_all_modules
from fusion_bench_featcal.setting_fields import same_as
from fusion_bench_featcal.settings import FeatCalSettings


@method("featcal_baselines/anchor_only", source="arXiv 2605.13030, Eq. 11")
class AnchorOnly(Method):
    """FeatCal's anchor alone: base + rho (merged - base) in place of the calibrated weights.

    It uses no data. FeatCal converges to it for large ridge_lambda.
    """

    anchor_rho: float = same_as(FeatCalSettings, "anchor_rho")
    calibrate_bias: bool = same_as(
        FeatCalSettings, "calibrate_bias", help="Set biases of linear modules, too."
    )
    calibrate_norm: bool = same_as(
        FeatCalSettings, "calibrate_norm", help="Set gains and shifts of norms, too."
    )
    modules: Sequence[str] | None = same_as(FeatCalSettings, "modules")
    family: Any = same_as(FeatCalSettings, "family")

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a pool without a base by a CalibrationError."""
        inputs.require_base("the anchor needs")

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Return a copy of the merged model with the anchors."""
        base = inputs.base(self.calibration_settings)
        assert base is not None
        return self.anchored(merged, base)

    @torch.no_grad()
    def anchored(self, merged: nn.Module, base: nn.Module | ExpertSource) -> nn.Module:
        """Return a copy of a model with `base + rho (merged - base)` (Eq. 11).

        It changes the modules that FeatCal would calibrate. Over task arithmetic with scale s it is
        equal to task arithmetic with scale `rho s` on these modules.

        Raises:
            CalibrationError: If the base does not fit, or modules cannot be calibrated.
        """
        settings, family = self.calibration_settings, resolve_family(self.family, merged)
        # The model in the family's view may share tensors with the merged one.
        model = copied_module(family.view.arranged(merged))
        stages, norms = family.stages(model), self.calibrate_norm
        blocks = find_all_modules(model, stages, settings, calibrate_norm=norms).values()
        source = family.view.source(source_of(base))
        start = ExpertModel("_pretrained_", source, model, role="base model")
        for site in (site for modules in blocks for site in modules.sites):
            has_bias = self.calibrate_bias or site.kind == "norm"
            for name in site.names if has_bias else site.names[:1]:
                parameter = model.get_parameter(name).data
                wide = solve_dtype(parameter.device)
                first, merged_one = start.tensor(name).to(wide), parameter.to(wide)
                parameter.copy_(torch.lerp(first, merged_one, self.anchor_rho))
        advice = "Lower method.anchor_rho, or merge in a wider dtype"
        refuse_not_finite(model, "the anchor", advice)
        return family.view.restored(model)
