"""Configs of a pool's models: one function for all, and a family that knows it."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from fusion_bench.modelpool import BaseModelPool
from torch import nn

from fusion_bench_featcal.experts.model_config import (
    check_same_function,
    complete_config,
    matching_part,
    read_config,
)
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.fusionbench.pool_models import (
    BASE_MODEL,
    MERGED_MODEL,
    adapter_paths,
    checkpoint_path,
)
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.preflight import empty_model
from fusion_bench_featcal.settings import FeatCalSettings

_VISION_TOWER = "clip_vision_model"


def check_pool_settings(modelpool: BaseModelPool, settings: FeatCalSettings) -> None:
    """Compare settings that depend on the models with their configs.

    Args:
        modelpool: The pool.
        settings: `family` and `ignore_config` are used.

    Raises:
        CalibrationError: If a model's config makes it another function than the one that runs its
            weights, or has no such blocks as the family needs.
        ValueError: If the family does not know the models, with what to try.
    """
    reference = next(iter(_by_importance(modelpool)), None)
    if reference is None:  # no config to compare; but a model in memory can be looked at
        for model in [m for m in modelpool._models.values() if isinstance(m, nn.Module)][:1]:
            resolve_family(settings.family, model).stages(model)
        return
    wanted = _config(modelpool, reference)
    other = "the base" if reference == BASE_MODEL else f"model {reference!r}"
    for name in modelpool.all_model_names:
        role = "expert" if name in modelpool.model_names else "model"
        check_same_function(
            name, _config(modelpool, name), wanted, settings.ignore_config, role=role, other=other
        )
    model = _model_as_loaded(modelpool, reference)
    if model is not None:
        resolve_family(settings.family, model).stages(model)
    elif settings.family == "auto":
        resolve_family("auto", _model_of_config(wanted or {}))


def _by_importance(modelpool: BaseModelPool) -> list[str]:
    """The models with a config that can be seen, first the one whose modules run the others."""
    names = [BASE_MODEL, MERGED_MODEL, *modelpool.model_names]
    known = (name for name in names if name in modelpool._models)
    return [name for name in known if _config(modelpool, name) is not None]


def _config(modelpool: BaseModelPool, name: str) -> dict[str, Any] | None:
    """A model's complete config; of a pool of CLIP's vision towers the tower's."""
    entry: Any = modelpool._models[name]
    if isinstance(entry, nn.Module):
        return complete_config(getattr(entry, "config", None))
    path = _config_folder(modelpool, name)
    config = None if path is None else complete_config(read_config(path))
    if config is None or not _holds_towers(modelpool):
        return config
    return matching_part(config, _VISION_TOWER)


def _config_folder(modelpool: BaseModelPool, name: str) -> Path | None:
    adapter = adapter_paths(modelpool, name)
    path = adapter[0] if adapter else checkpoint_path(modelpool, name)
    return path if path is not None and path.is_dir() else None


def _model_as_loaded(modelpool: BaseModelPool, name: str) -> nn.Module | None:
    """A model as the pool loads it, but without weights; None if that cannot be told."""
    entry: Any = modelpool._models[name]
    if isinstance(entry, nn.Module):
        return entry
    if text_kind(modelpool) is None and not _holds_towers(modelpool):
        return None
    try:
        return empty_model(str(_config_folder(modelpool, name)))
    except ValueError:
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


def _holds_towers(modelpool: BaseModelPool) -> bool:
    return any(kind.__name__ == "CLIPVisionModelPool" for kind in type(modelpool).__mro__)
