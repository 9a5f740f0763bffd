"""Models of a FusionBench pool: where they lie, and how they are read or loaded."""

import copy
import logging
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from fusion_bench.modelpool import BaseModelPool
from fusion_bench.utils.modelscope import resolve_repo_path
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.experts import ExpertSource, known_bytes
from fusion_bench_featcal.experts.lora import LoraExpert
from fusion_bench_featcal.experts.model_config import read_config
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.vocabulary import CommonRows
from fusion_bench_featcal.hub_errors import hub_error, is_of_hub
from fusion_bench_featcal.hub_files import fetch, fetch_all
from fusion_bench_featcal.module_copies import bind_own_functions
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)


BASE_MODEL = "_pretrained_"
MERGED_MODEL = "_merged_"
EXPECTED = (
    "it must be an existing folder or, online or in the local hub cache (HF_HUB_OFFLINE), a hub id"
)
# FusionBench's loaders of LoRA experts, by the end of their names: do they merge the adapter?
_LORA_LOADERS = {
    "load_lora_model": True,
    "load_peft_causal_lm": False,
    "load_lora_vision_model_hf": False,
}
_LORA_KEYS = (("base_model_path", "base_model_name"), ("peft_model_path", "peft_name"))
_NAME, _CONFIG = "pretrained_model_name_or_path", "config_path"
PLAIN_OPTIONS = {"_target_", _NAME, "torch_dtype", "dtype"}
_LORA_PARTS = {"load_lora_vision_model_hf": "vision_model."}  # of the base that the adapter is for


class PoolModel:
    """One model of a pool. Its files are looked for and their headers read once.

    Attributes:
        pool: The pool.
        name: The model's name in it.
    """

    def __init__(self, pool: BaseModelPool, name: str) -> None:
        """Refer to a model; nothing is looked at yet."""
        self.pool = pool
        self.name = name
        self._why_no_files = ""

    @property
    def entry(self) -> Any:
        """Its entry in `modelpool.models`, None if it has none."""
        return self.pool._models.get(self.name)

    @property
    def location(self) -> str | None:
        """The folder or hub id that its entry names."""
        location = self.entry
        if isinstance(location, Mapping):
            location = next((location[k] for k in (_NAME, _CONFIG) if k in location), None)
        return location if isinstance(location, str) else None

    @property
    def locations(self) -> dict[str, str]:
        """Keys of its entry that name what is fetched here -> folders or hub ids.

        A plain name has an empty key. An entry with further options loads itself.
        """
        entry, keys = self.entry, ("",)
        if isinstance(entry, str):
            entry = {"": entry}
        elif isinstance(entry, Mapping):
            target = str(entry.get("_target_", ""))
            is_plain = target.endswith(".from_pretrained") and not set(entry) - PLAIN_OPTIONS
            loader = _LORA_LOADERS.get(target.rsplit(".", 1)[-1], False)
            keys = (_NAME,) if is_plain else (_CONFIG,)
            if entry.get("merge_and_unload", loader):
                keys = tuple(key for names in _LORA_KEYS for key in names)
        else:
            return {}
        return {key: str(entry[key]) for key in keys if entry.get(key) is not None}

    @cached_property
    def paths(self) -> dict[str, Path]:
        """The same keys -> local folders; hub ids are downloaded.

        Raises:
            CalibrationError: If one cannot be found, naming the model and its entry.
        """
        return {key: self._resolve(location) for key, location in self.locations.items()}

    @property
    def module(self) -> nn.Module | None:
        """The model itself, where the pool holds it in memory."""
        return self.entry if isinstance(self.entry, nn.Module) else None

    @property
    def folder(self) -> Path | None:
        """Local folder of its checkpoint, None if it has none. Raises as `paths`."""
        return self.paths.get("", self.paths.get(_NAME)) if self.locations else None

    @property
    def adapter(self) -> tuple[Path, Path] | None:
        """Local folders of a LoRA expert's base and adapter, None of others. Raises as `paths`."""
        found = [self.paths[key] for names in _LORA_KEYS for key in names if key in self.locations]
        return (found[0], found[1]) if len(found) == 2 else None

    @property
    def local_entry(self) -> Any:
        """Its entry with local folders in the place of hub ids. Raises as `paths`."""
        paths = {key: str(path) for key, path in self.paths.items()}
        if paths == self.locations:
            return self.entry
        return paths.get("") or OmegaConf.merge(self.entry, paths)

    @property
    def folders(self) -> list[Path]:
        """Existing local folders of its files: one, or a LoRA expert's base and adapter."""
        folders = self.adapter or (self.folder,)
        return [folder for folder in folders if folder is not None and folder.is_dir()]

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """Content of its config.json, a LoRA expert's base's; None if there is none.

        Raises:
            CalibrationError: If the file cannot be read or is damaged.
        """
        if _CONFIG in self.locations:  # of an image classifier, which may get another head
            return read_config(self.paths[_CONFIG])
        return read_config(self.folders[0]) if self.folders else None

    @cached_property
    def files(self) -> ExpertSource | None:
        """Its weights in safetensors files, read tensor by tensor; None: it has no such files.

        Raises:
            CalibrationError: If the files cannot be found, or are damaged.
        """
        try:
            if self.adapter is not None:
                base, adapter = self.adapter
                part = _LORA_PARTS.get(str(self.entry.get("_target_")).rsplit(".", 1)[-1], "")
                source: ExpertSource = LoraExpert(SafetensorsExpert(base), adapter, part)
            elif self.folder is not None:
                source = SafetensorsExpert(self.folder)
            else:
                return None
        except FileNotFoundError as error:  # files of another kind
            self._why_no_files = f": {error}"
            return None
        rows = getattr(self.pool, "vocabulary_rows", None)
        return source if rows is None else CommonRows(source, rows)

    @property
    def file_bytes(self) -> int | None:
        """Bytes that are read to load it: 0 from memory; None: not known."""
        if self.module is not None:
            return 0
        source = self.files
        return None if source is None else sum(known_bytes(source, n) for n in source.names())

    def source(self, stream_experts: bool | str) -> nn.Module | ExpertSource:
        """The model as calibration reads it, by the setting `stream_experts`: its files, or whole.

        Raises:
            CalibrationError: If the model cannot be found, or has no safetensors files and
                `stream_experts` is True.
        """
        if stream_experts is not False:
            if self.files is not None:
                return self.files
            if self._why_no_files:
                log.debug("%s is loaded whole%s", self.name, self._why_no_files)
            if stream_experts is True:
                raise CalibrationError(
                    f"model {self.name!r} ({self.entry!r}) has no safetensors files to stream"
                    f"{self._why_no_files}. Set method.stream_experts=auto to load it whole"
                )
        return load_pool_model(self.pool, self.name)

    def not_loadable(self, error: Exception, location: str | None = None) -> CalibrationError:
        """The error of a model that cannot be found or loaded from `location`, else its entry's."""
        location, key = location or self.location, f"modelpool.models.{self.name}"
        why, hint = reason(error).rstrip("."), ""
        if why.startswith("Unsupported model configuration type"):
            why = "its model pool takes no plain names"
            hint = (
                ": write {_target_: transformers.<class>.from_pretrained, "
                f"pretrained_model_name_or_path: {self.entry}}}"
            )
        elif location is not None and not os.path.exists(location) and is_of_hub(error):
            return hub_error(error, f"{key}={location}")
        elif location is not None and _lacks_config(Path(location)):
            why = f"no config.json in {location}"
        return CalibrationError(
            f"model {self.name!r} ({self.entry}) cannot be loaded: {why}. Check {key}{hint}"
        )

    def _resolve(self, location: Any) -> Path:
        location = str(location)
        try:
            os.stat(location)
        except PermissionError as error:  # os.path.exists would deny that it is there
            raise CalibrationError(
                f"model {self.name!r}: {location} cannot be read: permission denied. Check "
                f"modelpool.models.{self.name}"
            ) from error
        except (OSError, ValueError):
            pass  # a hub id
        try:
            return local_path(self.pool, location, f"modelpool.models.{self.name}")
        except (OSError, ValueError, ImportError) as error:
            raise self.not_loadable(error, location) from error


def local_path(pool: BaseModelPool, location: str, setting: str, *, weights: bool = True) -> Path:
    """Fetch from the platform of a pool, or from the one that the location begins with, as `fetch`.

    Raises:
        CalibrationError: If it is neither here nor given by the hub.
        OSError, ValueError, ImportError: If another platform does not give it.
    """
    repo_id = hub_id(pool, location)
    if repo_id is not None:
        return fetch(repo_id, f"{setting}={location}", weights=weights)
    platform: Any = getattr(pool, "_platform", "hf")
    return Path(resolve_repo_path(location, repo_type="model", platform=platform))


def hub_id(pool: Any, location: str) -> str | None:
    """Return a location without the Hugging Face hub's name; None: it is on another platform."""
    platform, _, repo_id = location.rpartition("://")
    is_hub = (platform or getattr(pool, "_platform", "hf")) in ("hf", "huggingface")
    return repo_id if is_hub else None


def _lacks_config(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.glob("*config.json"))  # adapters, OpenCLIP


class PoolModels(Mapping[str, PoolModel]):
    """All models of a pool by name, for a whole run.

    Attributes:
        pool: The pool.
    """

    def __init__(self, pool: BaseModelPool) -> None:
        """Refer to a pool's models; nothing is looked at yet."""
        self.pool = pool
        self._models: dict[str, PoolModel] = {}

    @property
    def base(self) -> PoolModel | None:
        """The base model, if the pool has one."""
        return self[BASE_MODEL] if self.pool.has_pretrained else None

    @property
    def experts(self) -> dict[str, PoolModel]:
        """Task -> expert."""
        return {name: self[name] for name in self.pool.model_names}

    def fetch(self) -> None:
        """Download at once what the hub's cache lacks of all models. Raises as `fetch_all`."""
        fetch_all(
            {
                f"modelpool.models.{name}={location}": repo_id
                for name, model in self.items()
                for location in model.locations.values()
                if (repo_id := hub_id(self.pool, location))
            }
        )

    def require_base(self, purpose: str, instead: str = "") -> PoolModel:
        """Return the base model.

        Args:
            purpose: What needs one, for the message.
            instead: What else could be done, for the message.

        Raises:
            CalibrationError: If there is none, naming the setting.
        """
        if self.base is None:
            raise CalibrationError(
                f"the pool has no base model (modelpool.models.{BASE_MODEL}), which {purpose}: "
                f"name it{instead}"
            )
        return self.base

    def base_source(self, stream_experts: bool | str) -> nn.Module | ExpertSource | None:
        """The base as calibration reads it; None where the pool has none."""
        return None if self.base is None else self.base.source(stream_experts)

    def __getitem__(self, name: str) -> PoolModel:
        if name not in self.pool._models:
            raise KeyError(name)
        return self._models.setdefault(name, PoolModel(self.pool, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.pool.all_model_names)

    def __len__(self) -> int:
        return len(self.pool.all_model_names)


class ExpertSources(Mapping[str, Any]):
    """Experts as calibration reads them, each opened or loaded when it is asked for."""

    def __init__(self, models: PoolModels, stream_experts: bool | str) -> None:
        """Refer to a pool's experts; see `PoolModel.source` for `stream_experts`."""
        self._experts = models.experts
        self._stream = stream_experts

    def whole(self) -> int:
        """Number of them that would be whole models in memory."""
        return sum(self._stream is False or e.files is None for e in self._experts.values())

    def __getitem__(self, task: str) -> nn.Module | ExpertSource:
        return self._experts[task].source(self._stream)

    def __iter__(self) -> Iterator[str]:
        return iter(self._experts)

    def __len__(self) -> int:
        return len(self._experts)


def reason(error: BaseException) -> str:
    """The first line of an error's message, else its class; of what Hydra wraps the cause's."""
    if isinstance(error, HydraException) and error.__cause__ is not None:
        return reason(error.__cause__)
    return first_line(error)


def import_target(place: str, target: str) -> Any:
    """Import and return what a `_target_` names.

    Raises:
        CalibrationError: If that fails.
    """
    try:
        return get_object(target)
    except Exception as error:  # importing a module may raise anything
        raise CalibrationError(
            f"{place}._target_={target} cannot be imported: {reason(error)}. Check the name, and "
            "that its package is installed or its folder is in PYTHONPATH"
        ) from error


def loading_whole(modelpool: BaseModelPool, name: str | None = None) -> BaseModelPool:
    """The pool as it loads models: from local folders, and whole under `enable_lazy_loading`.

    Args:
        modelpool: The pool.
        name: The model that is to be loaded; None: any of them.
    """
    pool: Any = copy.copy(modelpool)
    if getattr(modelpool, "enable_lazy_loading", False):
        pool.enable_lazy_loading = False
    pool._models = copy.copy(modelpool._models)
    for other in map(str, modelpool._models or {}):
        model = PoolModel(modelpool, other)
        if name in (None, other) and model.local_entry != model.entry:
            pool._models[other] = model.local_entry
    return pool


def load_pool_model(modelpool: BaseModelPool, name: str) -> nn.Module:
    """Load one model of a pool whole.

    Raises:
        CalibrationError: If it cannot be found or loaded, naming it and its entry.
    """
    try:
        return bind_own_functions(loading_whole(modelpool, name).load_model(name))
    except (CalibrationError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a loader may raise anything
        raise PoolModel(modelpool, name).not_loadable(error) from error
