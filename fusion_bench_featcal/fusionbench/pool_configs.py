"""Checks of the configs of a pool's models: equal functions, and a family that fits."""

from collections.abc import Mapping
from typing import Any

import transformers
from torch import nn

from fusion_bench_featcal.experts.model_config import (
    check_same_function,
    complete_config,
    matching_part,
)
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.fusionbench.empty_models import empty_model
from fusion_bench_featcal.fusionbench.pool_models import (
    BASE_MODEL,
    MERGED_MODEL,
    PoolModel,
    PoolModels,
)
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.settings import FeatCalSettings

_VISION_TOWER = "clip_vision_model"


def check_pool_settings(models: PoolModels, settings: FeatCalSettings) -> None:
    """Compare settings that depend on the models with the models' configs.

    Args:
        models: The pool's models.
        settings: `family` is used.

    Raises:
        CalibrationError: If a model's config defines another function than the model that runs its
            weights, or the family does not find its blocks.
        ValueError: If no family fits the models, with advice.
    """
    configs = {name: _config(model) for name, model in models.items()}
    by_importance = [BASE_MODEL, MERGED_MODEL, *models.experts]
    reference = next((name for name in by_importance if configs.get(name) is not None), None)
    if reference is None:  # no config to compare, but a model in memory can be inspected
        modules = [model.module for model in models.values() if model.module is not None]
        model, is_certain = next(iter(modules), None), True
    else:
        other = "the base" if reference == BASE_MODEL else f"model {reference!r}"
        for name, config in configs.items():
            role = "expert" if name in models.experts else "model"
            check_same_function(name, config, configs[reference], role=role, other=other)
        model, is_certain = _model_as_loaded(models[reference])
    if model is not None and is_certain:
        resolve_family(settings.family, model).stages(model)
    elif model is not None and settings.family == "auto":
        resolve_family("auto", model)


def _config(model: PoolModel) -> dict[str, Any] | None:
    """Return a model's complete config, or the vision tower's for a pool of CLIP's towers."""
    if model.module is not None:
        return complete_config(getattr(model.module, "config", None))
    config = complete_config(model.config)
    if config is None or not _holds_towers(model.pool):
        return config
    return matching_part(config, _VISION_TOWER)


def _model_as_loaded(model: PoolModel) -> tuple[nn.Module | None, bool]:
    """Return a model without weights, and whether it has the class that the pool loads."""
    if model.module is not None or not model.folders:
        return model.module, True
    target = str(model.entry.get("_target_")) if isinstance(model.entry, Mapping) else ""
    name = target.removesuffix(".from_pretrained").removeprefix("transformers.")
    kind: Any = getattr(transformers, name, None)
    is_certain = kind is not None or text_kind(model.pool) is not None or _holds_towers(model.pool)
    try:
        return empty_model(str(model.folders[0]), kind), is_certain
    except Exception:  # the model's loader has the better message
        return None, False


def _holds_towers(modelpool: Any) -> bool:
    return any(kind.__name__ == "CLIPVisionModelPool" for kind in type(modelpool).__mro__)
