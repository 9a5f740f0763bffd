"""Models of a FusionBench pool: their locations, files and loading."""

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from fusion_bench.modelpool import BaseModelPool
from hydra.utils import get_object
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_featcal.data.text_limits import NO_LIMIT, end_tokens, positions_of
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.experts.copies import bind_own_functions
from fusion_bench_featcal.experts.source import total_bytes
from fusion_bench_featcal.models.adapter_files import load_paired
from fusion_bench_featcal.models.errors import loading_cause
from fusion_bench_featcal.models.hub import fetch, fetch_all
from fusion_bench_featcal.models.model_files import ModelFiles, load_lora_model
from fusion_bench_featcal.models.structure import fill
from fusion_bench_featcal.models.vocabulary import VocabularyRows
from fusion_bench_featcal.run.state import BASE_MODEL

MERGED_MODEL = "_merged_"
NAME, _CONFIG = "pretrained_model_name_or_path", "config_path"
_PLAIN_OPTIONS = {"_target_", NAME, "torch_dtype", "dtype"}
# Arguments of FusionBench's loaders of LoRA experts, for the base and for the adapter.
LORA_KEYS = ("base_model_path", "base_model_name", "peft_model_path", "peft_name")

OWN_LOADER = f"{load_lora_model.__module__}.{load_lora_model.__name__}"
"""Loader of LoRA experts that refuses such adapters itself."""


@dataclass(eq=False)
class PoolModel:
    """One model of a pool. Its files are located and their headers read once, on first use."""

    pool: BaseModelPool
    name: str

    @property
    def entry(self) -> Any:
        """The model's entry in `modelpool.models`, or None."""
        return self.pool._models.get(self.name)

    @property
    def module(self) -> nn.Module | None:
        """The module, if the pool has it in memory."""
        return self.entry if isinstance(self.entry, nn.Module) else None

    @property
    def location(self) -> str | None:
        """The folder or hub id of its weights. For a LoRA expert it is that of the adapter."""
        return next(reversed(self.locations.values()), None)

    @property
    def locations(self) -> dict[str, str]:
        """Key of its entry -> folder or hub id to download.

        An entry that is only a name has an empty key. The mapping is empty if FusionBench must load
        the model itself, because its entry has further options.
        """
        entry, keys = self.entry, (_CONFIG,)
        if not isinstance(entry, Mapping):
            return {"": entry} if isinstance(entry, str) and "://" not in entry else {}
        target = str(entry.get("_target_", ""))
        if target.endswith(".from_pretrained") and not set(entry) - _PLAIN_OPTIONS:
            keys = (NAME,)
        elif entry.get("merge_and_unload", target.endswith(".load_lora_model")):
            keys = LORA_KEYS
        locations = {key: str(entry[key]) for key in keys if entry.get(key) is not None}
        return {} if keys == LORA_KEYS and len(locations) != 2 else locations

    @cached_property
    def paths(self) -> dict[str, Path]:
        """Key of `locations` -> local folder. Hub ids are downloaded.

        Raises:
            CalibrationError: If a download fails, naming the model's setting.
        """
        setting = f"modelpool.models.{self.name}"
        return {key: fetch(name, f"{setting}={name}") for key, name in self.locations.items()}

    @cached_property
    def _opened(self) -> dict[str, ModelFiles]:
        label = f"modelpool.models.{self.name}"
        return {key: ModelFiles(path, label) for key, path in self.paths.items()}

    @property
    def folders(self) -> list[ModelFiles]:
        """Files of its weights: one model, or base and adapter of a LoRA expert."""
        return [files for key, files in self._opened.items() if key != _CONFIG]

    @property
    def config(self) -> dict[str, Any] | None:
        """Content of its config.json (for a LoRA expert the base's), or None if there is none.

        Raises:
            CalibrationError: If the file is damaged, or transformers builds another model from it.
        """
        files = next(iter(self._opened.values()), None)
        return None if files is None else files.config

    @cached_property
    def files(self) -> ExpertSource | None:
        """Its weights in safetensors files, read tensor by tensor, or None without such files.

        Raises:
            CalibrationError: If the files cannot be found, or are damaged.
        """
        for files in self.folders:
            files.check()
        if not self.folders:
            return None
        *bases, model = self.folders
        source = model.streamed(*bases, part=self.adapted_part)
        return None if source is None else self.with_common_rows(source)

    def with_common_rows(self, source: ExpertSource) -> ExpertSource:
        """Return weights of which only the common rows of the vocabulary are read."""
        rows = getattr(self.pool, "vocabulary_rows", None)
        return source if rows is None else VocabularyRows(source, rows)

    @property
    def adapted_part(self) -> str:
        """The base's module that a LoRA expert's adapter changes, empty for the whole base."""
        target = self.entry.get("_target_") if isinstance(self.entry, Mapping) else None
        return "vision_model" if str(target).endswith(".load_lora_vision_model_hf") else ""

    @property
    def file_bytes(self) -> int | None:
        """Bytes to read for loading the model, 0 if it is in memory, or None if unknown."""
        if self.module is not None:
            return 0
        source = self.files
        return None if source is None else total_bytes(source)

    def source(self) -> nn.Module | ExpertSource:
        """Return the model as safetensors files if it has them, else as a module.

        Raises:
            CalibrationError: If the model cannot be found or loaded.
        """
        return load_pool_model(self.pool, self.name) if self.files is None else self.files


class ProcessorPool(BaseModelPool):
    """A pool with the processor of its models' inputs."""

    _config_mapping = BaseModelPool._config_mapping | {"_processor": "processor"}

    def __init__(self, models: Any, *, processor: Any = None, **kwargs: Any) -> None:
        """Set up the pool. Nothing is loaded.

        Args:
            models: Model name -> configuration with `_target_`, or a module.
            processor: A folder, a hub id, a configuration or the object.
            **kwargs: As for FusionBench's pool.
        """
        super().__init__(models, **kwargs)
        self._processor = processor


class PoolModels(dict[str, PoolModel]):
    """All models of a pool by name, for a whole run."""

    def __init__(self, pool: BaseModelPool) -> None:
        """Create an entry for each model of a pool. Nothing is opened yet."""
        super().__init__({name: PoolModel(pool, name) for name in pool.all_model_names})
        self.pool = pool

    @property
    def base(self) -> PoolModel | None:
        """The base model, if the pool has one."""
        return self.get(BASE_MODEL)

    @property
    def first(self) -> PoolModel:
        """The base, or without one the first model."""
        return self.base or next(iter(self.values()))

    @property
    def experts(self) -> dict[str, PoolModel]:
        """Task -> expert."""
        return {name: self[name] for name in self.pool.model_names}

    @property
    def positions(self) -> int:
        """Number of positions of text models, or `NO_LIMIT` if their files do not declare it."""
        model = self.first
        if model.module is not None:
            return positions_of(model.module)
        try:
            return positions_of(model.folders[0].empty) if model.folders else NO_LIMIT
        except CalibrationError:  # the pool may be able to load it
            return NO_LIMIT

    @property
    def ends(self) -> frozenset[int]:
        """End tokens of text models, as far as their files declare them."""
        ends = set[int]()
        with suppress(CalibrationError, ValueError):  # the pool may be able to load such models
            for model in self.values():
                ends |= end_tokens(*(model.folders if model.module is None else [model.module]))
        return frozenset(ends)

    @property
    def start(self) -> int | None:
        """The decoder's start token in the first model's config, or None."""
        module: Any = self.first.module
        config = (self.first.config or {}) if module is None else module.config.to_dict()
        return config.get("decoder_start_token_id")

    def open(self) -> dict[str, ExpertSource | None]:
        """Download all files that are not in the hub's cache, then open all models.

        Returns:
            Model -> its weights in safetensors files, or None without such files.

        Raises:
            CalibrationError: If files are missing or damaged, naming the model.
        """
        locations = [(n, text) for n, model in self.items() for text in model.locations.values()]
        fetch_all({f"modelpool.models.{name}={location}": location for name, location in locations})
        return {name: model.files for name, model in self.items()}


def import_target(setting: str, target: str) -> Any:
    """Import and return the object named by a setting's `_target_`.

    Raises:
        CalibrationError: If the import fails.
    """
    try:
        return get_object(target)
    except Exception as error:  # importing a module may raise anything
        reason = first_line(error.__cause__ or error)  # Hydra's own begins with the name alone
        raise CalibrationError(
            f"{setting}._target_={target} cannot be imported: {reason}. Check the name, and that "
            "its package is installed or its folder is in PYTHONPATH"
        ) from error


def local_pool(modelpool: BaseModelPool, name: str | None = None) -> BaseModelPool:
    """Copy a pool so that it loads all models, or the one named, at once and from local folders."""
    pool: Any = copy.copy(modelpool)
    if getattr(modelpool, "enable_lazy_loading", False):
        pool.enable_lazy_loading = False
    models: Any = copy.copy(modelpool._models)
    names = modelpool.all_model_names if name is None else [name]
    for model in (PoolModel(modelpool, name) for name in names):
        # Files are checked, as transformers would read any file that an index names.
        opened = model._opened.items()
        paths = {key: str(files.folder_files.folder) for key, files in opened}
        if paths != model.locations:
            models[model.name] = paths.get("") or OmegaConf.merge(model.entry, paths)
    pool._models = models
    return pool


def load_pool_model(modelpool: BaseModelPool, name: str) -> nn.Module:
    """Load one model of a pool whole.

    Raises:
        CalibrationError: If it cannot be found or loaded, naming the model and its entry.
    """
    entry: Any = modelpool._models.get(name)
    with error_context(f"modelpool.models.{name}", cause=partial(_explain_loading_error, entry)):
        model = local_pool(modelpool, name).load_model(name)
        opened = PoolModel(modelpool, name)
        # PEFT only warns of tensors that belong to no module, and keeps the base's weights there.
        if len(opened.locations) > 1 and entry.get("_target_") != OWN_LOADER:
            base, adapter = opened.folders
            source = adapter.source(base, part=opened.adapted_part)
            fill(model, opened.with_common_rows(source))
        elif hasattr(model, "peft_config") and isinstance(entry, Mapping):  # it is not merged
            for adapter in filter(None, map(entry.get, LORA_KEYS[2:])):
                load_paired(model, fetch(adapter, f"modelpool.models.{name}={adapter}"))
        if not isinstance(model, nn.Module):
            raise CalibrationError(
                f"it returns a {type(model).__name__}, not an nn.Module. A source of weights can "
                "only be used from Python, in calibrate(...)"
            )
        return bind_own_functions(model)


def _explain_loading_error(entry: object, error: Exception) -> str | None:
    """Return why an entry of a pool cannot be loaded, or None if memory is full."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return None
    cause = loading_cause(error)
    if cause.startswith("Unsupported model configuration type"):
        target = f"{{_target_: transformers.<class>.from_pretrained, {NAME}: {entry}}}"
        cause = f"its model pool does not accept plain names. Write {target}"
    return f"{entry} cannot be loaded: {cause}"
