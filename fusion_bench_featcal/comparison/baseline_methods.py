"""The baselines as cells: FeatCal's anchor alone, and the corrections of final features."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from fusion_bench_featcal.baselines.anchor_only import anchor_only
from fusion_bench_featcal.baselines.layer_corrected import LayerCorrectedModel
from fusion_bench_featcal.baselines.post_merging import (
    Corrected,
    check_post_merging,
    post_merge,
)
from fusion_bench_featcal.baselines.settings import (
    CorrectionSettings,
    ProbSurgerySettings,
    RidgeSurgerySettings,
    SurgerySettings,
    setting_names,
    settings_from,
)
from fusion_bench_featcal.baselines.surgery_v2_algorithm import (
    SURGERY_V2_SETTINGS,
    check_surgery_v2,
    refuse_other_settings,
    surgery_v2_post_merge,
)
from fusion_bench_featcal.comparison.methods import CellInputs
from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.fusionbench.options import checked_settings
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, pool_source
from fusion_bench_featcal.nearest_names import nearest_hint, refuse_unknown_settings
from fusion_bench_featcal.settings import CalibrationError

_ANCHOR_SETTINGS = ("anchor_rho", "calibrate_bias", "calibrate_norm", "modules", "family")


class AnchorOnly:
    """FeatCal's anchor as a cell: `base + rho (merged - base)` on the modules it calibrates."""

    _config_mapping: ClassVar = {name: name for name in _ANCHOR_SETTINGS}

    def __init__(self, **settings: Any) -> None:
        """Check the settings.

        Args:
            **settings: `anchor_rho`, `calibrate_bias`, `calibrate_norm`, `modules`, `family`.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        refuse_unknown_settings(settings, _ANCHOR_SETTINGS, owner="the anchor")
        self._settings = checked_settings(settings)
        check_family(self._settings.family)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        values = self._settings.as_dict()
        return {name: values[name] for name in _ANCHOR_SETTINGS}

    def check(self, inputs: CellInputs) -> None:
        """See that there is a base.

        Raises:
            CalibrationError: If there is none.
        """
        if not inputs.modelpool.has_pretrained:
            raise CalibrationError(
                f"the pool has no base model (modelpool.models.{BASE_MODEL}), which the anchor "
                "needs"
            )

    def post_merge(self, merged: nn.Module, inputs: CellInputs) -> nn.Module:
        """Put the anchor in place of the merged weights."""
        base = pool_source(inputs.modelpool, BASE_MODEL, stream_experts="auto")
        return anchor_only(merged, base, self._settings)

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """None: the anchor needs no data."""
        return {}

    def added(self, model: nn.Module) -> dict[str, int]:
        """Nothing: the anchor takes the merged weights' place."""
        return {}


class FeatureCorrection:
    """Surgery, ProbSurgery, ridge surgery or SurgeryV2 as a cell."""

    _KINDS: ClassVar[dict[str, Any]] = {
        "surgery": SurgerySettings,
        "prob_surgery": ProbSurgerySettings,
        "ridge_surgery": RidgeSurgerySettings,
        "surgery_v2": SurgerySettings,
    }
    _config_mapping: ClassVar = {
        name: name for kind in _KINDS.values() for name in setting_names(kind)
    }

    def __init__(
        self,
        *,
        method: str,
        clip_model: str | None = None,
        final_norm: str | None = None,
        **settings: Any,
    ) -> None:
        """Check the settings.

        Args:
            method: `surgery`, `prob_surgery`, `ridge_surgery` or `surgery_v2`.
            clip_model: Checkpoint with the visual projection; None: the pool's base model.
            final_norm: The module that language models are corrected behind; None: found.
            **settings: Of that method.

        Raises:
            ValueError: If the method is unknown, or a setting is unknown or out of range.
        """
        if method not in self._KINDS:
            known, hint = ", ".join(self._KINDS), nearest_hint(method, self._KINDS)
            raise ValueError(f"method.method must be one of {known}, got {method!r}{hint}")
        names = None
        if method == "surgery_v2":
            refuse_other_settings(settings)
            names = SURGERY_V2_SETTINGS
        self._method = method
        self._clip_model, self._final_norm = clip_model, final_norm
        others = ("method", "clip_model", "final_norm")
        kind = self._KINDS[method]
        self._settings: CorrectionSettings = settings_from(kind, settings, others, names)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        site, names = {"clip_model": self._clip_model}, setting_names(type(self._settings))
        if self._method == "surgery_v2":
            names = SURGERY_V2_SETTINGS
        else:
            site["final_norm"] = self._final_norm
        values = {name: getattr(self._settings, name) for name in names}
        return {"method": self._method, **site, **values}

    def check(self, inputs: CellInputs) -> None:
        """Find the feature that is corrected and open the data.

        Raises:
            CalibrationError: If the models have none, or a task lacks data.
        """
        given = inputs.modelpool, self._settings, inputs.processor, self._clip_model
        if self._method == "surgery_v2":
            check_surgery_v2(*given)  # type: ignore[arg-type]
        else:
            check_post_merging(*given, self._final_norm)

    def post_merge(self, merged: nn.Module, inputs: CellInputs) -> nn.Module:
        """Fit the corrections, one expert in memory at a time."""
        pool, device = inputs.modelpool, inputs.fabric.device
        clip, processor = self._clip_model, inputs.processor
        settings, where = self._settings, {"device": device, "images": inputs.images}
        if self._method == "surgery_v2" and isinstance(settings, SurgerySettings):
            return surgery_v2_post_merge(merged, pool, settings, processor, clip, **where)
        return post_merge(merged, pool, settings, processor, clip, self._final_norm, **where)

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Samples that the corrections were fitted on: a test stream may have fewer than asked."""
        corrected = self._corrected(model)
        return {task: dict(corrected.samples[task]) for task in tasks if task in corrected.samples}

    def added(self, model: nn.Module) -> dict[str, int]:
        """The corrections of all tasks; projection and head are the model's own."""
        counts = {
            name: sum(parameter.numel() for parameter in part.parameters(recurse=False))
            for name, part in self._corrected(model).corrections.named_modules()
        }
        return {name: count for name, count in counts.items() if count}

    def _corrected(self, model: nn.Module) -> Corrected | LayerCorrectedModel:
        if not isinstance(model, Corrected | LayerCorrectedModel):
            raise CalibrationError(
                f"{self._method} must be the last of the methods that are applied in order"
            )
        return model
