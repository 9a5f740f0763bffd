"""Models of a FusionBench pool: from files block by block where possible, else loaded whole."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench.modelpool import BaseModelPool
from fusion_bench.utils.modelscope import resolve_repo_path
from omegaconf import DictConfig
from torch import nn

from fusion_bench_featcal.experts import ExpertSource, SafetensorsExpert
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

_EXPECTED = (
    "it must be an existing folder or, online or in the local hub cache (HF_HUB_OFFLINE), a hub id"
)
BASE_MODEL = "_pretrained_"
MERGED_MODEL = "_merged_"


def load_pool_model(modelpool: BaseModelPool, name: str) -> nn.Module:
    """Load one model of a pool whole.

    Args:
        modelpool: The pool.
        name: The model's name in it.

    Returns:
        The model.

    Raises:
        CalibrationError: If it cannot be found or loaded, naming it and its entry.
    """
    try:
        return modelpool.load_model(name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _not_loadable(name, modelpool._models.get(name), error) from error


def pool_source(
    modelpool: BaseModelPool, name: str, *, stream_experts: bool | str
) -> nn.Module | ExpertSource:
    """One model of a pool as calibration reads it.

    Args:
        modelpool: The pool.
        name: The model's name in it.
        stream_experts: The setting: `auto`, True or False.

    Returns:
        A source that reads safetensors files tensor by tensor, or the whole model.

    Raises:
        CalibrationError: If the model cannot be found, or has no safetensors files and
            `stream_experts` is True.
    """
    if stream_experts is not False:
        path = _checkpoint_path(modelpool, name)
        if path is not None:
            try:
                return SafetensorsExpert(path)
            except FileNotFoundError as error:
                log.info("%s is loaded whole: %s", name, error)
        if stream_experts is True:
            raise CalibrationError(
                f"model {name!r} has no safetensors files to stream (its entry is "
                f"{modelpool._models[name]!r}). Set method.stream_experts=auto to load it whole"
            )
    return load_pool_model(modelpool, name)


def check_pool_models(modelpool: BaseModelPool) -> None:
    """Find every model of a pool before any work is done.

    Args:
        modelpool: The pool.

    Raises:
        CalibrationError: If a model's folder or hub id cannot be found, naming it.
    """
    for name in modelpool.all_model_names:
        _checkpoint_path(modelpool, name)


def load_processor(modelpool: BaseModelPool) -> Any:
    """The pool's processor; None where it has none.

    Raises:
        CalibrationError: If it cannot be found, naming the setting.
    """
    entry = getattr(modelpool, "_processor", None)
    if entry is None:
        return None
    try:
        return modelpool.load_processor()  # type: ignore[attr-defined]
    except (OSError, ValueError, ImportError) as error:
        raise CalibrationError(
            f"the processor ({entry}) cannot be loaded: {_reason(error)}. Check "
            f"modelpool.processor: {_EXPECTED}"
        ) from error


def _checkpoint_path(modelpool: BaseModelPool, name: str) -> Path | None:
    """Local folder of a model's checkpoint (hub ids are downloaded), None if it has none."""
    entry = modelpool._models[name]
    location = entry
    if isinstance(entry, Mapping | DictConfig):
        options = set(entry) - {"_target_", "pretrained_model_name_or_path", "torch_dtype", "dtype"}
        plain = str(entry.get("_target_", "")).endswith(".from_pretrained") and not options
        location = entry.get("pretrained_model_name_or_path") if plain else None
    if not isinstance(location, str):
        return None
    try:
        platform: Any = getattr(modelpool, "_platform", "hf")
        return Path(resolve_repo_path(location, repo_type="model", platform=platform))
    except (OSError, ValueError, ImportError) as error:
        raise _not_loadable(name, entry, error) from error


def _not_loadable(name: str, entry: Any, error: Exception) -> CalibrationError:
    return CalibrationError(
        f"model {name!r} ({entry}) cannot be loaded: {_reason(error)}. Check "
        f"modelpool.models.{name}: {_EXPECTED}"
    )


def _reason(error: Exception) -> str:
    """The first line of an error's message, else its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
