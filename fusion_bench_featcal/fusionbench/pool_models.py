"""Models of a FusionBench pool: read from their files block by block, or loaded whole."""

import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fusion_bench.modelpool import BaseModelPool
from fusion_bench.utils.modelscope import resolve_repo_path
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig
from torch import nn

from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.experts.lora import LoraExpert
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.vocabulary import CommonRows
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)


BASE_MODEL = "_pretrained_"
MERGED_MODEL = "_merged_"
EXPECTED = (
    "it must be an existing folder or, online or in the local hub cache (HF_HUB_OFFLINE), a hub id"
)
PLAIN_OPTIONS = {"_target_", "pretrained_model_name_or_path", "torch_dtype", "dtype"}
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
        plain = plain and not set(entry) - PLAIN_OPTIONS
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


def import_target(place: str, target: str) -> None:
    """Import what a `_target_` names.

    Raises:
        CalibrationError: If that fails.
    """
    try:
        get_object(target)
    except Exception as error:  # importing a module may raise anything
        raise CalibrationError(
            f"{place}._target_={target} cannot be imported: {reason(error)}. Check the name, and "
            "that its package is installed"
        ) from error


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


def load_pool_model(modelpool: BaseModelPool, name: str) -> nn.Module:
    """Load one model of a pool whole.

    Raises:
        CalibrationError: If it cannot be found or loaded, naming it and its entry.
    """
    try:
        return modelpool.load_model(name)
    except (CalibrationError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a loader may raise anything
        raise not_loadable(name, modelpool._models.get(name), error) from error


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
    why = ""
    if stream_experts is not False:
        try:
            source = file_source(modelpool, name)
            if source is not None:
                return source
        except FileNotFoundError as error:
            why = f": {error}"
            log.info("%s is loaded whole%s", name, why)
        if stream_experts is True:
            raise CalibrationError(
                f"model {name!r} ({modelpool._models[name]!r}) has no safetensors files to stream"
                f"{why}. Set method.stream_experts=auto to load it whole"
            )
    return load_pool_model(modelpool, name)


class PoolSources(Mapping[str, Any]):
    """Experts as calibration reads them, each opened when it is asked for."""

    def __init__(
        self, modelpool: BaseModelPool, tasks: Sequence[str], *, stream_experts: bool | str
    ) -> None:
        """Name the experts."""
        self._modelpool = modelpool
        self._tasks = list(tasks)
        self._stream = stream_experts

    def __getitem__(self, task: str) -> nn.Module | ExpertSource:
        """One expert, as `pool_source` gives it."""
        if task not in self._tasks:
            raise KeyError(task)
        return pool_source(self._modelpool, task, stream_experts=self._stream)

    def held(self) -> int:
        """Number of them that would be whole models in memory."""
        return len(self) if self._stream is False else sum(map(self._is_whole, self))

    def _is_whole(self, task: str) -> bool:
        try:
            return file_source(self._modelpool, task) is None
        except FileNotFoundError:  # other files than safetensors
            return True

    def __iter__(self) -> Iterator[str]:
        """The experts' names."""
        return iter(self._tasks)

    def __len__(self) -> int:
        """Number of experts."""
        return len(self._tasks)


def file_source(modelpool: BaseModelPool, name: str) -> ExpertSource | None:
    """A model's weights as they lie in files: whole, or as a LoRA adapter beside its base.

    Returns:
        A source that reads tensor by tensor; None where the entry names no files.

    Raises:
        FileNotFoundError: If the files are of another kind than safetensors.
        CalibrationError: If they cannot be found, or are damaged.
    """
    adapter = adapter_paths(modelpool, name)
    path = checkpoint_path(modelpool, name)
    source: ExpertSource
    if adapter is not None:
        source = LoraExpert(SafetensorsExpert(adapter[0]), adapter[1])
    elif path is not None:
        source = SafetensorsExpert(path)
    else:
        return None
    rows = getattr(modelpool, "vocabulary_rows", None)
    return source if rows is None else CommonRows(source, rows)


def pool_for_merging(modelpool: BaseModelPool) -> BaseModelPool:
    """The pool as a merger may use it: with copies of models that it holds in memory.

    Mergers may work in place on such models, and the base and the experts are needed again.
    """
    if not modelpool.has_instance_models:
        return modelpool
    pool = copy.copy(modelpool)
    models: Any = {
        name: copy.deepcopy(entry) if isinstance(entry, nn.Module) else entry
        for name, entry in modelpool._models.items()
    }
    pool._models = models
    return pool
