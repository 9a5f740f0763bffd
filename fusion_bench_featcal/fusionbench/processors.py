"""The tokenizer or processor of a pool's inputs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench import instantiate
from fusion_bench.modelpool import BaseModelPool
from omegaconf import OmegaConf
from transformers import AutoImageProcessor, AutoTokenizer, CLIPProcessor

from fusion_bench_featcal.data.text_samples import TextKind
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.fusionbench.pool_models import NAME, PoolModels, is_elsewhere
from fusion_bench_featcal.models.hub import fetch
from fusion_bench_featcal.models.processors import check_tokenizers, load_processor

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
        What the pool's config names. Without a processor, pools of image classifiers have their
        base's.

    Raises:
        CalibrationError: If there is none, it cannot be loaded, or an expert has another tokenizer.
    """
    is_text = text_kind(modelpool) is not None
    name, kind = ("tokenizer", AutoTokenizer) if is_text else ("processor", AutoImageProcessor)
    entry = _named(modelpool, name)
    if hasattr(modelpool, "load_clip_model"):
        kind = CLIPProcessor
    elif entry is None and hasattr(modelpool, "load_processor"):
        models = PoolModels(modelpool)
        entry = (models.base or next(iter(models.values()))).location
    if entry is None:
        data = "texts" if is_text else "images"
        raise CalibrationError(
            f"the model pool names no {name}, which turns calibration {data} into model inputs; "
            f"set modelpool.{name}"
        )
    processor = _loaded(modelpool, f"modelpool.{name}", entry, kind)
    if is_text:
        _check_tokenizers(modelpool, processor)
    return processor


def _named(modelpool: Any, name: str) -> Any:
    """Return the entry of a pool's config, which some pools do not keep."""
    config = getattr(getattr(modelpool, "_program", None), "_modelpool", None)
    in_config = config.get(name) if isinstance(config, Mapping) else None
    entries = (getattr(modelpool, f"_{name}", None), getattr(modelpool, name, None), in_config)
    return next((entry for entry in entries if entry is not None), None)


def _loaded(modelpool: Any, setting: str, entry: Any, kind: Any) -> Any:
    """Load an entry: a folder, a hub id, a mapping with _target_, or the object itself."""
    is_local = not is_elsewhere(modelpool)
    if isinstance(entry, str) and is_local:
        folder = fetch(entry, f"{setting}={entry}", weights=False)
        return load_processor(folder, kind, setting)
    if not isinstance(entry, str | Mapping):
        return entry
    try:
        if isinstance(entry, str):
            return modelpool.load_processor()
        location = entry.get(NAME)
        if isinstance(location, str) and not {"revision", "subfolder"} & set(entry) and is_local:
            folder = fetch(location, f"{setting}={location}", weights=False)
            entry = OmegaConf.merge(entry, {NAME: str(folder)})
        return instantiate(entry)
    except CalibrationError:
        raise
    except Exception as error:  # a loader may raise anything
        raise CalibrationError(
            f"{setting} ({entry}) cannot be loaded: {first_line(error)}"
        ) from error


def _check_tokenizers(modelpool: BaseModelPool, tokenizer: Any) -> None:
    """Compare the tokenizer with the embeddings' rows and with the experts' tokenizers."""
    last, rows = max(tokenizer.get_vocab().values()), getattr(modelpool, "vocabulary_rows", None)
    if rows is not None and last >= rows:
        raise CalibrationError(
            f"the tokenizer has tokens up to {last}, but the models have only {rows} embedding "
            "rows in common. Check modelpool.tokenizer and modelpool.models"
        )
    experts = PoolModels(modelpool).experts.items()
    folders: dict[str, Path] = {
        f"expert {name!r} (modelpool.models.{name})": expert.folders[-1].folder
        for name, expert in experts
        if expert.folders
    }
    check_tokenizers(tokenizer, "modelpool.tokenizer", folders)
