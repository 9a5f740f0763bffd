"""Configs of a pool's models: one function for all, and a family that knows it."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from fusion_bench_featcal.experts.model_config import (
    check_same_function,
    complete_config,
    matching_part,
)
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.fusionbench.empty_models import empty_model, new_model
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
    """Compare settings that depend on the models with their configs.

    Args:
        models: The pool's models.
        settings: `family` and `ignore_config` are used.

    Raises:
        CalibrationError: If a model's config makes it another function than the one that runs its
            weights, or has no such blocks as the family needs.
        ValueError: If the family does not know the models, with what to try.
    """
    configs = {name: _config(model) for name, model in models.items()}
    by_importance = [BASE_MODEL, MERGED_MODEL, *models.experts]
    reference = next((name for name in by_importance if configs.get(name) is not None), None)
    if reference is None:  # no config to compare; but a model in memory can be looked at
        model = next((m.module for m in models.values() if m.module is not None), None)
    else:
        other = "the base" if reference == BASE_MODEL else f"model {reference!r}"
        expected, ignored = configs[reference], settings.ignore_config
        for name, config in configs.items():
            role = "expert" if name in models.experts else "model"
            check_same_function(name, config, expected, ignored, role=role, other=other)
        model = _model_as_loaded(models[reference])
    if model is not None:
        resolve_family(settings.family, model).stages(model)
    elif reference is not None and settings.family == "auto":
        resolve_family("auto", _model_of_config(configs[reference] or {}))


def _config(model: PoolModel) -> dict[str, Any] | None:
    """A model's complete config; of a pool of CLIP's vision towers the tower's."""
    if model.module is not None:
        return complete_config(getattr(model.module, "config", None))
    config = complete_config(model.config)
    if config is None or not _holds_towers(model.pool):
        return config
    return matching_part(config, _VISION_TOWER)


def _model_as_loaded(model: PoolModel) -> nn.Module | None:
    """A model as the pool loads it, but without weights; None if its class is unknown."""
    if model.module is not None or not model.folders:
        return model.module
    folder = model.folders[0]
    target = str(model.entry.get("_target_")) if isinstance(model.entry, Mapping) else ""
    name = target.removesuffix(".from_pretrained").removeprefix("transformers.")
    kind: Any = getattr(transformers, name, None)
    try:
        if kind is None:
            is_stock = text_kind(model.pool) is not None or _holds_towers(model.pool)
            return empty_model(str(folder)) if is_stock else None
        configs = transformers.AutoConfig if hasattr(kind, "from_config") else kind.config_class
        with torch.device("meta"):
            return new_model(kind, configs.from_pretrained(folder, trust_remote_code=False)).eval()
    except Exception:  # its own loader says it better
        return None


def _model_of_config(config: Mapping[str, Any]) -> nn.Module:
    """An empty model of the class that a config names, or of none; its structure is a guess."""
    architecture = next(iter(config.get("architectures") or ["a model"]))
    try:
        kind = getattr(transformers, architecture)
        with torch.device("meta"):
            return kind(kind.config_class.from_dict(dict(config)))
    except Exception:  # a class of another library, or a config that it refuses
        model: Any = type(architecture, (nn.Module,), {})()
        model.config = SimpleNamespace(**config)
        return model


def _holds_towers(modelpool: Any) -> bool:
    return any(kind.__name__ == "CLIPVisionModelPool" for kind in type(modelpool).__mro__)
