"""FeatCal's anchor by itself: what calibration tends to as lambda grows, without any data."""

import copy

import torch
from torch import nn

from fusion_bench_featcal.core import extrapolate_anchor
from fusion_bench_featcal.engine.block import load_updates
from fusion_bench_featcal.engine.modules import find_all_modules
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, source_of
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.settings import FeatCalSettings


@torch.no_grad()
def anchor_only(
    merged: nn.Module, base: nn.Module | ExpertSource, settings: FeatCalSettings
) -> nn.Module:
    """`base + rho (merged - base)` on the modules that FeatCal would calibrate (Eq. 11).

    It tells how much of FeatCal's gain is its anchor. Over task arithmetic with scale s it is task
    arithmetic with scale `rho s` on those modules.

    Args:
        merged: The merged model. It is not changed.
        base: The base model.
        settings: `anchor_rho`, `modules`, `calibrate_bias`, `calibrate_norm` and `family` are used.

    Returns:
        A copy of the merged model with the anchors in place.

    Raises:
        CalibrationError: If the base does not fit, or modules cannot be calibrated.
    """
    family = resolve_family(settings.family, merged)
    # What is shown may share tensors with the model.
    model = copy.deepcopy(family.view.shown(merged))
    modules = find_all_modules(model, family.stages(model), settings)
    source = family.view.source(source_of(base))
    start = ExpertModel("_pretrained_", source, model, role="base model")
    for block, found in modules.items():
        names = [site.weight_name for site in found.sites]
        names += [
            site.bias_name
            for site in found.sites
            if site.has_bias and (site.kind == "norm" or settings.calibrate_bias)
        ]
        anchors = {
            name: extrapolate_anchor(
                model.get_parameter(name).detach(), start.tensor(name), settings.anchor_rho
            )
            for name in names
        }
        load_updates(model, block, anchors)
    return family.view.restored(model)
