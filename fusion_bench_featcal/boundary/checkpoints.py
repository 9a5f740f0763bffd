"""Paths of the files of a pool's models."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench.modelpool import BaseModelPool
from fusion_bench.utils.modelscope import resolve_repo_path
from hydra.errors import HydraException
from omegaconf import DictConfig

from fusion_bench_featcal.settings import CalibrationError

EXPECTED = (
    "it must be an existing folder or, online or in the local hub cache (HF_HUB_OFFLINE), a hub id"
)
_PLAIN_OPTIONS = {"_target_", "pretrained_model_name_or_path", "torch_dtype", "dtype"}
# FusionBench's loaders of LoRA experts, by the end of their names: do they merge the adapter?
_LORA_LOADERS = {"load_lora_model": True, "load_peft_causal_lm": False}


def checkpoint_path(modelpool: BaseModelPool, name: str) -> Path | None:
    """Local folder of a model's checkpoint (hub ids are downloaded), None if it has none.

    Raises:
        CalibrationError: If it cannot be found, naming the model and its entry.
    """
    entry = modelpool._models[name]
    location = entry
    if isinstance(entry, Mapping | DictConfig):
        plain = str(entry.get("_target_", "")).endswith(".from_pretrained")
        plain = plain and not set(entry) - _PLAIN_OPTIONS
        location = entry.get("pretrained_model_name_or_path") if plain else None
    return _resolve(modelpool, name, location) if isinstance(location, str) else None


def adapter_paths(modelpool: BaseModelPool, name: str) -> tuple[Path, Path] | None:
    """Local folders of a LoRA expert's base and adapter; None if the model is no LoRA expert.

    Raises:
        CalibrationError: If one cannot be found, naming the model and its entry.
    """
    entry = modelpool._models[name]
    if not isinstance(entry, Mapping | DictConfig):
        return None
    loader = str(entry.get("_target_", "")).rsplit(".", 1)[-1]
    if not entry.get("merge_and_unload", _LORA_LOADERS.get(loader, False)):
        return None
    base, adapter = (
        _resolve(modelpool, name, str(entry[key])) for key in ("base_model_path", "peft_model_path")
    )
    return base, adapter


def not_loadable(name: str, entry: Any, error: Exception) -> CalibrationError:
    """The error of a model that cannot be found or loaded."""
    why, hint = reason(error), EXPECTED
    location = _location(entry)
    if why.startswith("Unsupported model configuration type"):
        why = "its model pool takes no plain names"
        hint = (
            "write {_target_: transformers.<class>.from_pretrained, "
            f"pretrained_model_name_or_path: {entry}}}"
        )
    elif location is None or os.path.exists(location):
        hint = ""
    return CalibrationError(
        f"model {name!r} ({entry}) cannot be loaded: {why}. Check modelpool.models.{name}"
        + (f": {hint}" if hint else "")
    )


def reason(error: BaseException) -> str:
    """The first line of an error's message, else its class; of what Hydra wraps the cause's."""
    if isinstance(error, HydraException) and error.__cause__ is not None:
        return reason(error.__cause__)
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _location(entry: Any) -> str | None:
    """The folder or hub id that an entry names."""
    if isinstance(entry, Mapping | DictConfig):
        entry = entry.get("pretrained_model_name_or_path")
    return entry if isinstance(entry, str) else None


def _resolve(modelpool: BaseModelPool, name: str, location: str) -> Path:
    try:
        os.stat(location)
    except PermissionError as error:  # os.path.exists would deny that it is there
        raise CalibrationError(
            f"model {name!r}: {location} cannot be read: permission denied. Check "
            f"modelpool.models.{name}"
        ) from error
    except (OSError, ValueError):
        pass  # a hub id
    try:
        platform: Any = getattr(modelpool, "_platform", "hf")
        return Path(resolve_repo_path(location, repo_type="model", platform=platform))
    except (OSError, ValueError, ImportError) as error:
        raise not_loadable(name, modelpool._models[name], error) from error
