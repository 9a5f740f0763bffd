"""Checks of a pool's models before any is loaded: entries, configs, headers of files."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from typing import Any
from weakref import WeakSet

from fusion_bench.modelpool import BaseModelPool
from omegaconf import DictConfig, OmegaConf
from torch import nn

from fusion_bench_featcal.experts import ExpertModel, ExpertSource, InMemoryExpert
from fusion_bench_featcal.experts.far_experts import far_experts
from fusion_bench_featcal.experts.model_config import (
    read_config,
)
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import (
    BASE_MODEL,
    adapter_paths,
    checkpoint_path,
    file_source,
    import_target,
    load_pool_model,
    not_loadable,
)
from fusion_bench_featcal.fusionbench.processors import check_same_kind, text_kind
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)


_LOAD_SEQ2SEQ = "transformers.AutoModelForSeq2SeqLM.from_pretrained"
_WEIGHTS = ("*.safetensors*", "*.bin*", "*.pt", "*.pth")
_DATA = ("train_datasets", "val_datasets", "test_datasets")


def check_pool_models(modelpool: BaseModelPool, fabric: Any) -> None:
    """Find every model of a pool before any work is done; warn of what is hardly meant.

    Args:
        modelpool: The pool. FusionBench's pool of sequence-to-sequence models, which loads no
            model that is named by its folder or hub id alone, can do so from here on.
        fabric: Lightning Fabric.

    Raises:
        CalibrationError: If the precision has no effect, or a model's entry is none, its files
            cannot be found or read or are damaged, naming it.
    """
    check_precision(fabric)
    _check_entries(modelpool)
    _check_targets(modelpool)
    for name in modelpool.all_model_names:
        try:
            _check_files(modelpool, name)
        except CalibrationError as error:
            place = f"modelpool.models.{name}"
            if place in str(error):
                raise
            raise CalibrationError(f"model {name!r}: {error}. Check {place}") from error
    warn_about_pool(modelpool)


def check_precision(fabric: Any) -> None:
    """Refuse a precision that would convert models, which a pool loads in dtypes of their own.

    Raises:
        CalibrationError: If it is neither 32-true nor a mixed one, with what to set instead.
    """
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


def check_pool_experts(modelpool: BaseModelPool, base: nn.Module) -> dict[str, ExpertModel]:
    """Compare experts that lie in files with the base, reading configs and headers only.

    Returns:
        The experts that lie in files, by task.

    Raises:
        CalibrationError: If an expert is of another architecture or has another vocabulary, lacks
            a tensor or has it in another shape, naming both.
    """
    experts = {}
    for name in modelpool.model_names:
        path = checkpoint_path(modelpool, name)
        if path is not None and text_kind(modelpool) is not None:
            check_same_kind(modelpool, name, path, base)
        try:
            source = file_source(modelpool, name)
        except FileNotFoundError:
            continue  # other files than safetensors: compared when they are loaded
        if source is not None:
            experts[name] = ExpertModel(name, source, base)
    return experts


def check_experts(modelpool: BaseModelPool) -> list[str]:
    """Load the base, if there is one, and compare experts with it; see `check_pool_experts`.

    Returns:
        A sentence for each expert that lies far farther from the base than the others.

    Raises:
        CalibrationError: If the base cannot be loaded or an expert does not fit it.
    """
    if not modelpool.has_pretrained:
        return []
    base = load_pool_model(modelpool, BASE_MODEL)
    return far_experts(check_pool_experts(modelpool, base), base)


def _check_entries(modelpool: BaseModelPool) -> None:
    """Refuse entries that are none; give names of folders the form that FusionBench loads."""
    if not modelpool._models:
        raise CalibrationError("modelpool.models is empty: name a base model and experts")
    for name in modelpool.all_model_names:
        entry: Any = modelpool._models[name]
        if entry is None or entry == "" or isinstance(plain(entry), bool | int | float | list):
            raise CalibrationError(
                f"modelpool.models.{name} is {plain(entry)!r}, which is no model: give a folder or "
                "hub id, or a mapping with _target_"
            )
        if isinstance(entry, str) and text_kind(modelpool) == "seq2seq":
            spelt = {"_target_": _LOAD_SEQ2SEQ, "pretrained_model_name_or_path": entry}
            models: Any = modelpool._models
            models[name] = OmegaConf.create(spelt)


def _check_targets(modelpool: BaseModelPool) -> None:
    """Import what every `_target_` of the pool names."""
    parts = {"models": modelpool._models, **{name: _part(modelpool, name) for name in _DATA}}
    parts |= {name: _part(modelpool, name) for name in ("processor", "tokenizer")}
    for place, target in _targets(parts, "modelpool"):
        import_target(place, target)


def _part(modelpool: BaseModelPool, name: str) -> Any:
    return getattr(modelpool, f"_{name}", None) or getattr(modelpool, name, None)


def _targets(config: Any, place: str) -> Iterator[tuple[str, str]]:
    if not isinstance(config, Mapping | DictConfig):
        return
    for key, value in config.items():
        if key == "_target_" and isinstance(value, str):
            yield place, value
        else:
            yield from _targets(value, f"{place}.{key}")


def _check_files(modelpool: BaseModelPool, name: str) -> None:
    """See that a model's files are there and readable, by names and headers."""
    entry, path = modelpool._models[name], checkpoint_path(modelpool, name)
    if path is not None and path.is_dir():
        try:
            files = os.listdir(path)
        except OSError as error:
            raise CalibrationError(f"{path} cannot be read: {error.strerror}") from error
        if not any(fnmatch(file, pattern) for file in files for pattern in _WEIGHTS):
            raise not_loadable(name, entry, FileNotFoundError(f"no weights in {path}"))
        if read_config(path) is None and "adapter_config.json" not in files:
            raise not_loadable(name, entry, FileNotFoundError(f"no config.json in {path}"))
    with suppress(FileNotFoundError):  # files of another kind
        file_source(modelpool, name)


_TENSORS = 16  # of each model, for a first comparison
_VALUES = 32  # of each tensor, from its middle
_warned: WeakSet[Any] = WeakSet()


def warn_about_pool(modelpool: BaseModelPool) -> None:
    """Warn once a pool of tasks that no expert has, and of models with the same weights.

    Args:
        modelpool: The pool; its program's task pool is looked at besides.
    """
    if modelpool in _warned:
        return
    _warned.add(modelpool)
    _warn_of_tasks(modelpool)
    _warn_of_twins(modelpool)


def _warn_of_tasks(modelpool: BaseModelPool) -> None:
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
    return {str(name) for part in parts if isinstance(part, Mapping | DictConfig) for name in part}


def _warn_of_twins(modelpool: BaseModelPool) -> None:
    sources = {name: _source(modelpool, name) for name in modelpool.model_names}
    base = _source(modelpool, BASE_MODEL) if modelpool.has_pretrained else None
    seen: list[str] = []
    for name, source in sources.items():
        twin = next((other for other in seen if _same(source, sources[other])), None)
        if twin is not None:
            log.warning("experts %r and %r have the same weights", twin, name)
        elif base is not None and _same(source, base):
            log.warning(
                "expert %r has the base model's weights: there is nothing to learn from it", name
            )
        seen.append(name)


def _source(modelpool: BaseModelPool, name: str) -> ExpertSource | tuple[Any, ...] | None:
    """A model's weights where a glimpse of them is cheap; a LoRA expert's folders."""
    entry: Any = modelpool._models[name]
    if isinstance(entry, nn.Module):
        return InMemoryExpert(entry)
    adapter = adapter_paths(modelpool, name)
    if adapter is not None:
        return adapter
    path = checkpoint_path(modelpool, name)
    try:
        return None if path is None else SafetensorsExpert(path)
    except FileNotFoundError:  # files of another kind
        return None


def _same(one: Any, other: Any) -> bool:
    """Tell whether two models seem to hold the same values under the names that both have."""
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
