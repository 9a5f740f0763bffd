"""The tokenizer or processor of a pool's inputs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench import instantiate
from fusion_bench.modelpool import BaseModelPool
from omegaconf import OmegaConf
from transformers import AutoImageProcessor, AutoTokenizer, CLIPProcessor

from fusion_bench_featcal.data.pictures import check_channels
from fusion_bench_featcal.data.text_samples import TextKind
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.fusionbench.pool_models import NAME, PoolModels
from fusion_bench_featcal.models.hub import fetch
from fusion_bench_featcal.models.processors import (
    check_processors,
    check_tokenizers,
    load_tokenizers,
    read_processor,
)

# By name, because importing FusionBench's pools of language models takes seconds.
_KINDS: Mapping[str, TextKind] = {
    "Seq2SeqLMPool": "seq2seq",
    "CausalLMPool": "causal",
    "SequenceClassificationModelPool": "classification",
    "GPT2ForSequenceClassificationPool": "classification",
}
GENERATORS: tuple[TextKind, ...] = ("seq2seq", "causal")
"""Kinds of text models that generate text."""


def text_kind(modelpool: Any) -> TextKind | None:
    """Return the kind of a pool's text models, from its class or a parent, or None."""
    names = [parent.__name__ for parent in type(modelpool).__mro__]
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def load_input_processor(models: PoolModels) -> Any:
    """Load the tokenizer or processor that converts a pool's data to inputs of its models.

    Without one in its config, a pool of image classifiers has its base's.

    Raises:
        CalibrationError: If there is none, it cannot be loaded, or an expert has another one.
    """
    modelpool = models.pool
    folders: dict[str, Path] = {
        f"expert {name!r} (modelpool.models.{name})": expert.folders[-1].folder
        for name, expert in models.experts.items()
        if expert.folders
    }
    if text_kind(modelpool) is not None:
        tokenizer = _loaded(models, "tokenizer", AutoTokenizer)
        _check_vocabulary(modelpool, tokenizer)
        check_tokenizers(tokenizer, "modelpool.tokenizer", load_tokenizers(folders))
        return tokenizer
    is_clip = hasattr(modelpool, "load_clip_model")
    processor = _loaded(models, "processor", CLIPProcessor if is_clip else AutoImageProcessor)
    check_processors(processor, "modelpool.processor", folders)
    first = models.first
    config = first.config or {}
    channels = (config.get("vision_config") or config).get("num_channels")
    check_channels(processor, channels, f"modelpool.models.{first.name}")
    return processor


def _loaded(models: PoolModels, name: str, kind: Any) -> Any:
    """Load a pool's entry: a folder, a hub id, a mapping with _target_, or the object itself."""
    entry, setting = _entry(models, name), f"modelpool.{name}"
    if entry is None:
        raise CalibrationError(
            f"the model pool names no {name}, which converts samples to model inputs: set {setting}"
        )
    if isinstance(entry, str):
        return read_processor(fetch(entry, f"{setting}={entry}", weights=False), kind, setting)
    if not isinstance(entry, Mapping):
        return entry
    location = entry.get(NAME)
    if isinstance(location, str) and not {"revision", "subfolder"} & set(entry):
        folder = fetch(location, f"{setting}={location}", weights=False)
        entry = OmegaConf.merge(entry, {NAME: str(folder)})
    try:
        return instantiate(entry)
    except Exception as error:  # a loader may raise anything
        cause = first_line(error)
        raise CalibrationError(f"{setting} ({entry}) cannot be loaded: {cause}") from error


def _entry(models: PoolModels, name: str) -> Any:
    """Return the entry of a pool's config, which some pools do not keep, or the base's folder."""
    modelpool = models.pool
    config = getattr(getattr(modelpool, "_program", None), "_modelpool", None) or {}
    entries = (getattr(modelpool, f"_{name}", None), getattr(modelpool, name, None))
    for entry in (*entries, config.get(name)):
        if entry is not None:
            return entry
    if not hasattr(modelpool, "load_processor") or hasattr(modelpool, "load_clip_model"):
        return None
    return models.first.location


def _check_vocabulary(modelpool: BaseModelPool, tokenizer: Any) -> None:
    """Compare the tokenizer with the embeddings' rows."""
    last, rows = max(tokenizer.get_vocab().values()), getattr(modelpool, "vocabulary_rows", None)
    if rows is not None and last >= rows:
        raise CalibrationError(
            f"the tokenizer has tokens up to {last}, but the models have only {rows} embedding "
            "rows in common. Check modelpool.tokenizer and modelpool.models"
        )
