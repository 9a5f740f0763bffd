"""Tokenizers and processors of a pool, compared with the experts' tokenizers."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fusion_bench import instantiate
from fusion_bench.modelpool import BaseModelPool
from omegaconf import OmegaConf
from transformers import AutoImageProcessor, AutoTokenizer

from fusion_bench_featcal.data.text_samples import TextKind
from fusion_bench_featcal.data.tokenizers import differing_tokens
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.experts.model_config import read_config
from fusion_bench_featcal.fusionbench.pool_models import NAME, PoolModels, is_elsewhere, local_pool
from fusion_bench_featcal.models.hub import fetch

# By name, because importing FusionBench's pools of language models takes seconds.
_KINDS: Mapping[str, TextKind] = {
    "Seq2SeqLMPool": "seq2seq",
    "CausalLMPool": "causal",
    "SequenceClassificationModelPool": "classification",
    "GPT2ForSequenceClassificationPool": "classification",
}


def text_kind(modelpool: Any) -> TextKind | None:
    """Return the kind of a pool's text models, from its class or a parent, or None."""
    names = [parent.__name__ for parent in type(modelpool).__mro__]
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def load_input_processor(modelpool: BaseModelPool) -> Any:
    """Load the tokenizer or processor that converts the pool's data to model inputs.

    Returns:
        The tokenizer, compared with the experts' tokenizers, for FusionBench's pools of text
        models. For other pools the processor that the config names, or the models' processor.

    Raises:
        CalibrationError: If there is none, it cannot be found, or an expert has another tokenizer.
    """
    is_text = text_kind(modelpool) is not None
    name, data = ("tokenizer", "texts") if is_text else ("processor", "images")
    entry, load = _tokenizer(modelpool) if is_text else _processor(modelpool)
    if entry is None:
        raise CalibrationError(
            f"the model pool names no {name}, which turns calibration {data} into model inputs; "
            f"set modelpool.{name}"
        )
    try:
        loaded = load()
    except CalibrationError:
        raise
    except Exception as error:  # a loader may raise anything
        raise CalibrationError(
            f"the {name} ({entry}) cannot be loaded: {first_line(error)}. Check modelpool.{name}: "
            "it must be an existing folder or, online or in the local hub cache (HF_HUB_OFFLINE), "
            "a hub id"
        ) from error
    if is_text:
        _check_expert_tokenizers(modelpool, loaded)
    return loaded


def _tokenizer(modelpool: Any) -> tuple[Any, Callable[[], Any]]:
    """Return the entry and the loader of a pool's tokenizer.

    FusionBench's `Seq2SeqLMPool` cannot load its tokenizer.
    """
    entry = getattr(modelpool, "_tokenizer", None)
    entry = getattr(modelpool, "tokenizer", None) if entry is None else entry
    return entry, lambda: _load(modelpool, "tokenizer", entry, AutoTokenizer)


def _processor(modelpool: Any) -> tuple[Any, Callable[[], Any]]:
    """Return the entry and the loader of a pool's image processor.

    FusionBench's pools of image classifiers ignore `modelpool.processor` and load the base's
    processor, unless the base is only named by its folder or hub id. Here `modelpool.processor` has
    priority.
    """
    if hasattr(modelpool, "_processor"):
        entry, pool = modelpool._processor, copy.copy(modelpool)
        pool._processor = _local_entry(modelpool, "processor", entry)
        return entry, pool.load_processor
    config = getattr(getattr(modelpool, "_program", None), "_modelpool", None)
    entry = config.get("processor") if isinstance(config, Mapping) else None
    if entry is None and hasattr(modelpool, "load_processor"):
        models = PoolModels(modelpool)
        model = models.base or next(iter(models.values()))
        if isinstance(model.entry, Mapping):
            pool = local_pool(modelpool, model.name)
            return model.entry, pool.load_processor  # type: ignore[attr-defined]
        entry = model.location
    return entry, lambda: _load(modelpool, "processor", entry, AutoImageProcessor)


def _load(modelpool: Any, name: str, entry: Any, kind: Any) -> Any:
    entry = _local_entry(modelpool, name, entry)
    if isinstance(entry, str):
        read_config(Path(entry))
        return kind.from_pretrained(entry, trust_remote_code=False)
    return instantiate(entry) if isinstance(entry, Mapping) else entry


def _local_entry(modelpool: Any, name: str, entry: Any) -> Any:
    """Replace the hub id in the entry of a tokenizer or processor by a local folder."""
    if isinstance(entry, str) and not is_elsewhere(modelpool):
        return str(fetch(entry, f"modelpool.{name}={entry}", weights=False))
    if (
        isinstance(entry, Mapping)
        and isinstance(entry.get(NAME), str)
        and str(entry.get("_target_")).endswith(".from_pretrained")
        and not {"revision", "subfolder"} & set(entry)
    ):
        return OmegaConf.merge(entry, {NAME: _local_entry(modelpool, name, entry[NAME])})
    return entry


def _check_expert_tokenizers(modelpool: BaseModelPool, tokenizer: Any) -> None:
    """Compare the pool's tokenizer with the experts' tokenizers, token by token.

    An expert's tokenizer may have additional tokens, which never reach the expert.
    """
    vocabulary = tokenizer.get_vocab()
    rows = getattr(modelpool, "vocabulary_rows", None)
    if rows is not None and max(vocabulary.values()) >= rows:
        raise CalibrationError(
            f"the tokenizer has tokens up to {max(vocabulary.values())}, but the models have only "
            f"{rows} embedding rows in common. Check modelpool.tokenizer and modelpool.models"
        )
    for name, expert in PoolModels(modelpool).experts.items():
        differing = differing_tokens(tokenizer, expert.folders[-1]) if expert.folders else ""
        if differing:
            raise CalibrationError(
                f"expert {name!r} has another tokenizer than the pool: {differing}. Check "
                f"modelpool.tokenizer and modelpool.models.{name}"
            )
