"""Tokenizers and processors of a pool, compared with the experts' tokenizers."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fusion_bench import instantiate
from fusion_bench.modelpool import BaseModelPool
from omegaconf import OmegaConf
from transformers import AutoImageProcessor, AutoTokenizer

from fusion_bench_featcal.data.text_samples import TextKind
from fusion_bench_featcal.data.tokenizers import differing_tokens
from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.experts.model_config import read_config
from fusion_bench_featcal.fusionbench.pool_models import PoolModels, local_path, local_pool
from fusion_bench_featcal.settings import CalibrationError

_LOCATION = "pretrained_model_name_or_path"
# By name and not by class: importing FusionBench's pools of language models takes seconds.
_KINDS: Mapping[str, TextKind] = {
    "Seq2SeqLMPool": "seq2seq",
    "CausalLMPool": "causal",
    "SequenceClassificationModelPool": "classification",
    "GPT2ForSequenceClassificationPool": "classification",
}


def text_kind(modelpool: Any) -> TextKind | None:
    """Return the kind of a pool's text models by its class or a parent; None if it has none."""
    names = [parent.__name__ for parent in type(modelpool).__mro__]
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def load_input_processor(modelpool: BaseModelPool) -> Any:
    """Load the tokenizer or processor that turns the pool's data into model inputs.

    Returns:
        For FusionBench's pools of text models the tokenizer, compared with the experts' tokenizers;
        else the processor that the config names, or that the pool has for its models.

    Raises:
        CalibrationError: If there is none, it cannot be found, or an expert has another tokenizer.
    """
    is_text = text_kind(modelpool) is not None
    name, data = ("tokenizer", "texts") if is_text else ("processor", "images")
    entry = getattr(modelpool, f"_{name}", None)
    load: Callable[[], Any] = partial(_processor, modelpool)
    if is_text:
        entry = getattr(modelpool, "tokenizer", None) if entry is None else entry
        load = partial(_tokenizer, modelpool, entry)
    elif not hasattr(modelpool, "_processor"):
        entry, load = _classifiers_processor(modelpool)
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


def _processor(modelpool: Any) -> Any:
    """The processor of FusionBench's pool of CLIP models, loaded from a local folder."""
    pool = copy.copy(modelpool)
    pool._processor = _local_entry(modelpool, "processor", modelpool._processor)
    return pool.load_processor()


def _local_entry(modelpool: Any, name: str, entry: Any) -> Any:
    """Replace the hub id in the entry of a tokenizer or processor by a local folder."""
    if isinstance(entry, str):
        return str(local_path(modelpool, entry, f"modelpool.{name}", weights=False))
    is_plain = isinstance(entry, Mapping) and not {"revision", "subfolder"} & set(entry)
    is_plain = is_plain and str(entry.get("_target_")).endswith(".from_pretrained")
    if is_plain and isinstance(entry.get(_LOCATION), str):
        return OmegaConf.merge(entry, {_LOCATION: _local_entry(modelpool, name, entry[_LOCATION])})
    return entry


def _classifiers_processor(modelpool: Any) -> tuple[Any, Callable[[], Any]]:
    """Entry and loader of the processor of a pool whose class takes none.

    FusionBench's pools of image classifiers ignore `modelpool.processor`, which comes first here,
    and load the base's processor, but not if the base is named by its folder or hub id alone.
    """
    config = getattr(getattr(modelpool, "_program", None), "_modelpool", None)
    entry = config.get("processor") if isinstance(config, Mapping) else None
    if isinstance(entry, Mapping):
        return entry, lambda: instantiate(_local_entry(modelpool, "processor", entry))
    models = PoolModels(modelpool)
    model = models.base or next(iter(models.values()))
    has_loader = hasattr(modelpool, "load_processor")
    if entry is None and has_loader and isinstance(model.entry, Mapping):
        pool: Any = local_pool(modelpool, model.name)
        return model.entry, pool.load_processor
    location = entry or (model.location if has_loader else None)

    def load() -> Any:
        folder = _local_entry(modelpool, "processor", location)
        return AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)

    return location, load


def _tokenizer(modelpool: Any, entry: Any) -> Any:
    """The tokenizer of an entry; FusionBench's `Seq2SeqLMPool` cannot load its own."""
    entry = _local_entry(modelpool, "tokenizer", entry)
    if isinstance(entry, str):
        read_config(Path(entry))
        return AutoTokenizer.from_pretrained(entry, trust_remote_code=False)
    return instantiate(entry) if isinstance(entry, Mapping) else entry


def _check_expert_tokenizers(modelpool: BaseModelPool, tokenizer: Any) -> None:
    """Compare the pool's tokenizer with the experts' tokenizers, token by token.

    An expert's tokenizer may have further tokens, which never reach the expert.
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
