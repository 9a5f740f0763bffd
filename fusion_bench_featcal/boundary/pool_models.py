"""Models of a FusionBench pool: from files block by block where possible, else loaded whole."""

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench import instantiate
from fusion_bench.modelpool import BaseModelPool
from fusion_bench.utils.modelscope import resolve_repo_path
from omegaconf import DictConfig
from torch import nn
from transformers import AutoTokenizer

from fusion_bench_featcal.experts import ExpertModel, ExpertSource, SafetensorsExpert
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.text_samples import TextKind

log = logging.getLogger(__name__)

_EXPECTED = (
    "it must be an existing folder or, online or in the local hub cache (HF_HUB_OFFLINE), a hub id"
)
BASE_MODEL = "_pretrained_"
MERGED_MODEL = "_merged_"
# By name and not by class: importing FusionBench's language model pools takes seconds.
_KINDS: Mapping[str, TextKind] = {"Seq2SeqLMPool": "seq2seq", "CausalLMPool": "causal"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")


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
    reason = ""
    if stream_experts is not False:
        path = _checkpoint_path(modelpool, name)
        if path is not None:
            try:
                return SafetensorsExpert(path)
            except FileNotFoundError as error:
                reason = f": {error}"
                log.info("%s is loaded whole%s", name, reason)
        if stream_experts is True:
            raise CalibrationError(
                f"model {name!r} ({modelpool._models[name]!r}) has no safetensors files to stream"
                f"{reason}. Set method.stream_experts=auto to load it whole"
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
        path = _checkpoint_path(modelpool, name)
        if path is not None and path.is_dir() and not any(path.glob("*.safetensors*")):
            weights = [f for pattern in ("*.bin*", "*.pt", "*.pth") for f in path.glob(pattern)]
            if not weights:
                raise _not_loadable(name, modelpool._models[name], FileNotFoundError("no weights"))


def check_pool_experts(modelpool: BaseModelPool, base: nn.Module) -> None:
    """Compare the tensors of experts that lie in files with the base's, reading headers only.

    Args:
        modelpool: The pool.
        base: Its base model.

    Raises:
        CalibrationError: If an expert lacks a tensor or has it in another shape, naming both.
    """
    for name in modelpool.model_names:
        path = _checkpoint_path(modelpool, name)
        if path is not None and any(path.glob("*.safetensors")):
            ExpertModel(name, SafetensorsExpert(path), base)


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
    except (OSError, ValueError, ImportError) as error:
        raise CalibrationError(
            f"the processor ({entry}) cannot be loaded: {_reason(error)}. Check "
            f"modelpool.processor: {_EXPECTED}"
        ) from error


def text_kind(modelpool: Any) -> TextKind | None:
    """What kind of language models a pool holds; None: it holds none.

    Args:
        modelpool: A FusionBench pool.

    Returns:
        `seq2seq` for a `Seq2SeqLMPool`, `causal` for a `CausalLMPool` (or what derives from them).
    """
    names = [parent.__name__ for parent in type(modelpool).__mro__]
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def load_input_processor(modelpool: BaseModelPool) -> Any:
    """What turns the pool's data into model inputs: a tokenizer or a processor.

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


def load_tokenizer(modelpool: BaseModelPool) -> Any:
    """The pool's tokenizer. FusionBench's `Seq2SeqLMPool` cannot load its own.

    Raises:
        CalibrationError: If there is none or it cannot be found, naming the setting.
    """
    entry = getattr(modelpool, "_tokenizer", None) or getattr(modelpool, "tokenizer", None)
    if entry is None:
        raise CalibrationError(
            "the model pool names no tokenizer, which turns calibration texts into model inputs; "
            "set modelpool.tokenizer"
        )
    try:
        if isinstance(entry, str):
            return AutoTokenizer.from_pretrained(entry)
        return instantiate(entry) if isinstance(entry, Mapping | DictConfig) else entry
    except (OSError, ValueError, ImportError) as error:
        raise CalibrationError(
            f"the tokenizer ({entry}) cannot be loaded: {_reason(error)}. Check "
            f"modelpool.tokenizer: {_EXPECTED}"
        ) from error


def check_expert_tokenizers(modelpool: BaseModelPool, tokenizer: Any) -> None:
    """Compare the pool's tokenizer with those that experts bring, token by token.

    An expert may know further tokens: they never reach it.

    Args:
        modelpool: The pool.
        tokenizer: The tokenizer that the inputs of all models are made with.

    Raises:
        CalibrationError: If an expert's own tokenizer gives a token another id, or lacks it.
    """
    ours = tokenizer.get_vocab()
    for name in modelpool.model_names:
        path = _checkpoint_path(modelpool, name)
        if path is None or not any((path / file).is_file() for file in _TOKENIZER_FILES):
            continue
        theirs = AutoTokenizer.from_pretrained(str(path)).get_vocab()
        other = sorted(token for token, number in ours.items() if theirs.get(token) != number)
        if other:
            raise CalibrationError(
                f"expert {name!r} has another tokenizer than the pool: {len(other)} of "
                f"{len(ours)} tokens differ, such as {other[0]!r} ({ours[other[0]]} here, "
                f"{theirs.get(other[0])} there). Check modelpool.tokenizer and "
                f"modelpool.models.{name}"
            )


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
