"""Checks of a pool's models before any is loaded: entries, headers of files, precision."""

import os
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from omegaconf import OmegaConf

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import refuse_unusable_names
from fusion_bench_featcal.experts import ExpertModel, InMemoryExpert
from fusion_bench_featcal.experts.likeness import notes_on_experts
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import (
    PoolModel,
    PoolModels,
    import_target,
    load_pool_model,
)
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.settings import FeatCalSettings

_LOAD_SEQ2SEQ = "transformers.AutoModelForSeq2SeqLM.from_pretrained"
_WEIGHTS = ("*.safetensors*", "*.bin*", "*.pt", "*.pth")


def check_pool_models(models: PoolModels, fabric: Any) -> None:
    """Check that every model of a pool can be found before any work is done.

    Args:
        models: The pool's models. FusionBench's pool of sequence-to-sequence models cannot load
            plain folders and hub ids. Their entries are changed here so that it can.
        fabric: Lightning Fabric.

    Raises:
        CalibrationError: If the precision has no effect, there is no expert, or a model's entry or
            files are missing, unreadable or damaged, naming the model.
        ValueError: If an expert's name cannot be a task's name.
    """
    _check_precision(fabric)
    refuse_unusable_names(models.experts, "modelpool.models")
    if not models.pool._models:
        raise CalibrationError("modelpool.models is empty: name a base model and experts")
    for model in models.values():
        _check_entry(model)
    models.fetch()
    for name, model in models.items():
        try:
            _check_files(model)
        except CalibrationError as error:
            setting = f"modelpool.models.{name}"
            if setting in str(error):
                raise
            raise CalibrationError(f"model {name!r}: {error}. Check {setting}") from error
    if not models.experts:
        raise CalibrationError(
            f"modelpool.models has no expert (it has {', '.join(models)}): name the task's model "
            "as +modelpool.models.TASK"
        )


def _check_precision(fabric: Any) -> None:
    """Refuse a precision that would convert models. A pool loads them in their stored dtypes."""
    precision = str(fabric.strategy.precision.precision)
    if precision == "32-true" or precision.endswith("-mixed"):
        return
    raise CalibrationError(
        f"fabric.precision={precision} has no effect on a pool's models, which keep the dtype that "
        "they are loaded in. Set fabric.precision=32-true, bf16-mixed or 16-mixed, or the models' "
        "dtype: torch_dtype of every entry of modelpool.models"
    )


def _check_entry(model: PoolModel) -> None:
    """Refuse an entry that is not a model, and convert a folder's name to FusionBench's form."""
    entry, setting = plain(model.entry), f"modelpool.models.{model.name}"
    if entry is None or entry == "" or isinstance(entry, bool | int | float | list):
        raise CalibrationError(
            f"{setting} is {entry!r}, which is no model: give a folder or hub id, or a mapping "
            "with _target_"
        )
    if isinstance(entry, Mapping) and isinstance(entry.get("_target_"), str):
        import_target(setting, entry["_target_"])
    if isinstance(entry, str) and text_kind(model.pool) == "seq2seq":
        loader = {"_target_": _LOAD_SEQ2SEQ, "pretrained_model_name_or_path": entry}
        entries: Any = model.pool._models
        entries[model.name] = OmegaConf.create(loader)


def _check_files(model: PoolModel) -> None:
    """Check that a model's files exist and are readable, by names and headers."""
    for path in model.folders:
        try:
            files = os.listdir(path)
        except NotADirectoryError:  # a single safetensors file
            continue
        except OSError as error:
            raise CalibrationError(f"{path} cannot be read: {error.strerror}") from error
        if not any(fnmatch(file, pattern) for file in files for pattern in _WEIGHTS):
            raise model.not_loadable(FileNotFoundError(f"no weights in {path}"))
        if model.config is None and "adapter_config.json" not in files:
            raise model.not_loadable(FileNotFoundError(f"no config.json in {path}"))
    _ = model.files  # reads the headers


def check_experts(models: PoolModels) -> list[str]:
    """Load the base, if there is one, and compare experts with it by the headers of their files.

    Returns:
        Sentences on experts that are unrelated to the base, equal to it, or very similar.

    Raises:
        CalibrationError: If the base cannot be loaded, or an expert has another architecture or
            vocabulary, lacks a tensor or has another shape, naming both.
    """
    if models.base is None:
        return []
    base = load_pool_model(models.pool, models.base.name)
    experts = {}
    for name, expert in models.experts.items():
        if expert.folder is not None and text_kind(models.pool) is not None:
            _check_same_kind(expert, base)
        if expert.files is not None:  # other experts are compared when they are loaded
            experts[name] = ExpertModel(name, expert.files, base)
    return notes_on_experts(experts, ExpertModel("base", InMemoryExpert(base), base))


def _check_same_kind(expert: PoolModel, base: Any) -> None:
    """Compare the configs of a language model's expert and base."""
    config, expected = expert.config, getattr(base, "config", None)
    if config is None or expected is None:
        return
    check = f"Check modelpool.models.{expert.name}"
    if config.get("model_type") != expected.model_type:
        raise CalibrationError(
            f"expert {expert.name!r} is a {config.get('model_type')!r} model, the base a "
            f"{expected.model_type!r} one: experts must share the base's architecture. {check}"
        )
    rows = config.get("vocab_size", expected.vocab_size)
    if rows != expected.vocab_size and getattr(expert.pool, "vocabulary_rows", None) is None:
        raise CalibrationError(
            f"expert {expert.name!r} has {rows} embedding rows, the base {expected.vocab_size}. "
            f"{check}, or cut all models to their common rows: "
            "modelpool._target_=fusion_bench_featcal.pools.CausalLMPool "
            "+modelpool.vocabulary=common_rows"
        )


def check_read_budget(models: PoolModels, settings: FeatCalSettings) -> None:
    """Refuse a read budget if an expert would be loaded whole.

    Raises:
        CalibrationError: Naming the expert and the setting.
    """
    if settings.expert_read_budget is None:
        return
    for name, expert in models.experts.items():
        if expert.module is None and expert.files is None:
            raise CalibrationError(
                f"method.expert_read_budget cannot be kept: expert {name!r} ({expert.entry!r}) has "
                "no safetensors files to read block by block, so it is loaded whole. Save it as "
                f"safetensors (modelpool.models.{name}), or set method.expert_read_budget=null"
            )
