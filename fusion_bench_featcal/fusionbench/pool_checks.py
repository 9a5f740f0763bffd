"""Checks of a pool's models before any is loaded: entries, headers of files, precision."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any
from weakref import WeakSet

from omegaconf import OmegaConf

from fusion_bench_featcal.experts import ExpertModel, ExpertSource, InMemoryExpert
from fusion_bench_featcal.experts.far_experts import far_experts
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import (
    PoolModel,
    PoolModels,
    import_target,
    load_pool_model,
)
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.nearest_names import refuse_unusable_names
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)


_LOAD_SEQ2SEQ = "transformers.AutoModelForSeq2SeqLM.from_pretrained"
_WEIGHTS = ("*.safetensors*", "*.bin*", "*.pt", "*.pth")
_DATA = ("train_datasets", "val_datasets", "test_datasets")


def check_pool_models(models: PoolModels, fabric: Any) -> None:
    """Find every model of a pool before any work is done; warn of what is hardly meant.

    Args:
        models: The pool's models. FusionBench's pool of sequence-to-sequence models, which loads
            no model that is named by its folder or hub id alone, can do so from here on.
        fabric: Lightning Fabric.

    Raises:
        CalibrationError: If the precision has no effect, a model's entry is none, its files
            cannot be found or read or are damaged, naming it, or there is no expert.
        ValueError: If an expert's name cannot be a task's.
    """
    _check_precision(fabric)
    refuse_unusable_names(models.experts, "modelpool.models")
    _check_entries(models)
    _check_targets(models.pool)
    models.fetch()
    for name, model in models.items():
        try:
            _check_files(model)
        except CalibrationError as error:
            place = f"modelpool.models.{name}"
            if place in str(error):
                raise
            raise CalibrationError(f"model {name!r}: {error}. Check {place}") from error
    if not models.experts:
        raise CalibrationError(
            f"modelpool.models has no expert (it has {', '.join(models)}): name the task's model "
            "as +modelpool.models.TASK"
        )
    if models.pool not in _warned:
        _warned.add(models.pool)
        _warn_of_tasks(models.pool)
        _warn_of_twins(models)


_warned: WeakSet[Any] = WeakSet()


def _check_precision(fabric: Any) -> None:
    """Refuse a precision that would convert models, which a pool loads in dtypes of their own."""
    precision = str(fabric.strategy.precision.precision)
    if precision == "32-true" or precision.endswith("-mixed"):
        return
    dtype = {"bf16": "bfloat16", "16": "float16", "64": "float64"}.get(precision.split("-")[0])
    mixed = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}.get(str(dtype), "32-true")
    loading = f", or load the models in {dtype}: torch_dtype of every entry of modelpool.models"
    raise CalibrationError(
        f"fabric.precision={precision} has no effect on a pool's models, which keep the dtype that "
        f"they are loaded in. Set fabric.precision={mixed}{loading if dtype else ''}"
    )


def check_experts(models: PoolModels) -> list[str]:
    """Load the base, if there is one, and compare experts in files with it by their headers.

    Returns:
        A sentence for each expert that lies far farther from the base than the others, and on
        experts whose changes of the base are alike.

    Raises:
        CalibrationError: If the base cannot be loaded; or an expert is of another architecture or
            has another vocabulary, lacks a tensor or has it in another shape, naming both.
    """
    if models.base is None:
        return []
    base = load_pool_model(models.pool, models.base.name)
    experts = {}
    for name, expert in models.experts.items():
        if expert.folder is not None and text_kind(models.pool) is not None:
            _check_same_kind(expert, base)
        if expert.files is not None:  # others are compared when they are loaded
            experts[name] = ExpertModel(name, expert.files, base)
    return far_experts(experts, base)


def check_read_budget(models: PoolModels, settings: FeatCalSettings) -> None:
    """Refuse a read budget where an expert in files would be loaded whole.

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


def _check_same_kind(expert: PoolModel, base: Any) -> None:
    """Compare the config of a language model's expert with the base's."""
    config, expected = expert.config, getattr(base, "config", None)
    if config is None or expected is None:
        return
    place = f"Check modelpool.models.{expert.name}"
    if config.get("model_type") != expected.model_type:
        raise CalibrationError(
            f"expert {expert.name!r} is a {config.get('model_type')!r} model, the base a "
            f"{expected.model_type!r} one: experts must share the base's architecture. {place}"
        )
    rows = config.get("vocab_size", expected.vocab_size)
    if rows != expected.vocab_size and getattr(expert.pool, "vocabulary_rows", None) is None:
        raise CalibrationError(
            f"expert {expert.name!r} has {rows} embedding rows, the base {expected.vocab_size}. "
            f"{place}, or cut all models to their common rows: "
            "modelpool._target_=fusion_bench_featcal.pools.CausalLMPool "
            "+modelpool.vocabulary=common_rows"
        )


def _check_entries(models: PoolModels) -> None:
    """Refuse entries that are none; give names of folders the form that FusionBench loads."""
    if not models.pool._models:
        raise CalibrationError("modelpool.models is empty: name a base model and experts")
    for name, model in models.items():
        entry = plain(model.entry)
        if entry is None or entry == "" or isinstance(entry, bool | int | float | list):
            raise CalibrationError(
                f"modelpool.models.{name} is {entry!r}, which is no model: give a folder or hub "
                "id, or a mapping with _target_"
            )
        if isinstance(entry, str) and text_kind(models.pool) == "seq2seq":
            spelt = {"_target_": _LOAD_SEQ2SEQ, "pretrained_model_name_or_path": entry}
            entries: Any = models.pool._models
            entries[name] = OmegaConf.create(spelt)


def _check_targets(modelpool: Any) -> None:
    """Import what every `_target_` of the pool names."""
    parts = {"models": modelpool._models}
    for name in (*_DATA, "processor", "tokenizer"):
        parts[name] = getattr(modelpool, f"_{name}", None) or getattr(modelpool, name, None)
    for place, target in _targets(parts, "modelpool"):
        import_target(place, target)


def _targets(config: Any, place: str) -> Iterator[tuple[str, str]]:
    if not isinstance(config, Mapping):
        return
    for key, value in config.items():
        if key == "_target_" and isinstance(value, str):
            yield place, value
        else:
            yield from _targets(value, f"{place}.{key}")


def _check_files(model: PoolModel) -> None:
    """See that a model's files are there and readable, by names and headers."""
    path = model.folder
    if path is not None and path.is_dir():
        try:
            files = os.listdir(path)
        except OSError as error:
            raise CalibrationError(f"{path} cannot be read: {error.strerror}") from error
        if not any(fnmatch(file, pattern) for file in files for pattern in _WEIGHTS):
            raise model.not_loadable(FileNotFoundError(f"no weights in {path}"))
        if model.config is None and "adapter_config.json" not in files:
            raise model.not_loadable(FileNotFoundError(f"no config.json in {path}"))
    _ = model.files  # reads the headers


def _warn_of_tasks(modelpool: Any) -> None:
    """Warn of tasks with data in the pool, or in its program's task pool, but without an expert."""
    taskpool = getattr(getattr(modelpool, "_program", None), "taskpool", None)
    named = {
        "modelpool": _names(modelpool, ("_train_datasets", "_val_datasets", "_test_datasets")),
        "taskpool": _names(taskpool, ("_test_datasets", "_tasks", "tasks")),
    }
    for place, tasks in named.items():
        without = sorted(tasks - set(modelpool.model_names))
        if without:
            log.warning(
                "%s has data of tasks that no expert of modelpool.models has: %s",
                place,
                ", ".join(without),
            )


def _names(pool: Any, keys: Iterable[str]) -> set[str]:
    parts = (getattr(pool, key, None) for key in keys)
    return {str(name) for part in parts if isinstance(part, Mapping) for name in part}


def _warn_of_twins(models: PoolModels) -> None:
    """Warn of experts with the same weights as another, or as the base."""
    base = None if models.base is None else _glimpsable(models.base)
    seen: dict[str, Any] = {}
    for name, expert in models.experts.items():
        source = _glimpsable(expert)
        twin = next((other for other in seen if _same(source, seen[other])), None)
        if twin is not None:
            log.warning("experts %r and %r have the same weights", twin, name)
        elif _same(source, base):
            log.warning(
                "expert %r has the base model's weights: there is nothing to learn from it", name
            )
        seen[name] = source


def _glimpsable(model: PoolModel) -> ExpertSource | tuple[Any, ...] | None:
    """A model's weights where a glimpse of them is cheap; a LoRA expert's folders."""
    module = model.module
    return InMemoryExpert(module) if module is not None else model.adapter or model.files


_TENSORS = 16  # of each model, for a first comparison
_VALUES = 32  # of each tensor, from its middle


def _same(one: Any, other: Any) -> bool:
    """Return whether two models seem to hold the same values under the names that both have."""
    if one is None or isinstance(one, tuple) or isinstance(other, tuple) or other is None:
        return one is not None and one == other
    names = sorted(one.names() & other.names())
    few = names[:: max(1, len(names) // _TENSORS)]
    # A few tensors tell most pairs apart; fine-tuning may have left just those as they were.
    return bool(names) and all(_glimpse(one, n) == _glimpse(other, n) for n in (*few, *names))


def _glimpse(source: ExpertSource, name: str) -> tuple[Any, ...]:
    values = source.tensor(name).detach().reshape(-1)
    start = max(0, len(values) - _VALUES) // 2
    return source.shape(name), str(values.dtype), values[start : start + _VALUES].tolist()
