"""Models of a FusionBench pool: from files block by block where possible, else loaded whole."""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from fusion_bench.modelpool import BaseModelPool
from torch import nn

from fusion_bench_featcal.boundary.checkpoints import (
    EXPECTED,
    adapter_paths,
    checkpoint_path,
    not_loadable,
    reason,
)
from fusion_bench_featcal.boundary.tokenizers import (
    check_expert_tokenizers,
    load_tokenizer,
    text_kind,
)
from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.experts.lora import LoraExpert
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.vocabulary import CommonRows
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

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
        """Name the experts.

        Args:
            modelpool: The pool.
            tasks: Their names in it.
            stream_experts: The setting, see `pool_source`.
        """
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

    Args:
        modelpool: The pool.
        name: The model's name in it.

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


def load_processor(modelpool: BaseModelPool) -> Any:
    """The pool's processor, which turns images into model inputs.

    Raises:
        CalibrationError: If there is none or it cannot be found, naming the setting.
    """
    entry = getattr(modelpool, "_processor", None)
    if entry is None:
        raise CalibrationError(
            "the model pool names no processor, which turns calibration images into model inputs; "
            "set modelpool.processor"
        )
    try:
        return modelpool.load_processor()  # type: ignore[attr-defined]
    except Exception as error:  # a loader may raise anything
        raise CalibrationError(
            f"the processor ({entry}) cannot be loaded: {reason(error)}. Check "
            f"modelpool.processor: {EXPECTED}"
        ) from error


def load_input_processor(modelpool: BaseModelPool) -> Any:
    """Load what turns the pool's data into model inputs: a tokenizer or a processor.

    Args:
        modelpool: The pool.

    Returns:
        For FusionBench's pools of language models the tokenizer, checked against the experts' own;
        else the processor.

    Raises:
        CalibrationError: If there is none, it cannot be found, or an expert has another tokenizer.
    """
    if text_kind(modelpool) is not None:
        tokenizer = load_tokenizer(modelpool)
        check_expert_tokenizers(modelpool, tokenizer)
        return tokenizer
    return load_processor(modelpool)
