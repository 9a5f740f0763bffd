"""Tokenizers and processors of a pool, and what each of its experts makes of the tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench import instantiate
from fusion_bench.modelpool import BaseModelPool
from omegaconf import DictConfig
from transformers import AutoTokenizer

from fusion_bench_featcal.data.text_samples import TextKind
from fusion_bench_featcal.experts.model_config import read_config
from fusion_bench_featcal.fusionbench.pool_models import (
    EXPECTED,
    adapter_paths,
    checkpoint_path,
    reason,
)
from fusion_bench_featcal.settings import CalibrationError

# By name and not by class: importing FusionBench's pools of language models takes seconds.
_KINDS: Mapping[str, TextKind] = {"Seq2SeqLMPool": "seq2seq", "CausalLMPool": "causal"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")


def text_kind(modelpool: Any) -> TextKind | None:
    """Kind of language models that a pool holds; None: it holds none.

    Returns:
        `seq2seq` for a `Seq2SeqLMPool`, `causal` for a `CausalLMPool` (or what derives from them).
    """
    names = [parent.__name__ for parent in type(modelpool).__mro__]
    return next((_KINDS[name] for name in names if name in _KINDS), None)


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
    except Exception as error:  # a loader may raise anything
        raise CalibrationError(
            f"the tokenizer ({entry}) cannot be loaded: {reason(error)}. Check "
            f"modelpool.tokenizer: {EXPECTED}"
        ) from error


def check_expert_tokenizers(modelpool: BaseModelPool, tokenizer: Any) -> None:
    """Compare the pool's tokenizer with those that experts bring, token by token.

    An expert may know further tokens: they never reach it.

    Args:
        modelpool: The pool.
        tokenizer: The tokenizer that the inputs of all models are made with.

    Raises:
        CalibrationError: If an expert's own tokenizer gives a token another id, or lacks it; or if
            the tokenizer has more tokens than models have embedding rows in common.
    """
    ours = tokenizer.get_vocab()
    rows = getattr(modelpool, "vocabulary_rows", None)
    if rows is not None and max(ours.values()) >= rows:
        raise CalibrationError(
            f"the tokenizer has tokens up to {max(ours.values())}, but the models have only {rows} "
            "embedding rows in common. Check modelpool.tokenizer and modelpool.models"
        )
    for name in modelpool.model_names:
        theirs = _own_vocabulary(modelpool, name)
        other = sorted(token for token, number in ours.items() if theirs.get(token) != number)
        if theirs and other:
            raise CalibrationError(
                f"expert {name!r} has another tokenizer than the pool: {len(other)} of "
                f"{len(ours)} tokens differ, such as {other[0]!r} ({ours[other[0]]} here, "
                f"{theirs.get(other[0])} there). Check modelpool.tokenizer and "
                f"modelpool.models.{name}"
            )


def check_same_kind(modelpool: BaseModelPool, name: str, path: Path, base: Any) -> None:
    """Compare an expert's config with the base model's.

    Raises:
        CalibrationError: If it is of another architecture, or has another number of embedding rows
            and the pool does not say what to do about it.
    """
    config, known = read_config(path), getattr(base, "config", None)
    if known is None or config is None:
        return
    if config.get("model_type") != known.model_type:
        raise CalibrationError(
            f"expert {name!r} is a {config.get('model_type')!r} model, the base a "
            f"{known.model_type!r} one: experts must share the base's architecture. Check "
            f"modelpool.models.{name}"
        )
    rows = config.get("vocab_size", known.vocab_size)
    if rows != known.vocab_size and getattr(modelpool, "vocabulary_rows", None) is None:
        raise CalibrationError(
            f"expert {name!r} has {rows} embedding rows, the base {known.vocab_size}. Check "
            f"modelpool.models.{name}, or cut all models to their common rows: "
            "modelpool._target_=fusion_bench_featcal.pools.CausalLMPool "
            "+modelpool.vocabulary=common_rows"
        )


def _own_vocabulary(modelpool: BaseModelPool, name: str) -> dict[str, int]:
    """Token -> id of the tokenizer in an expert's own folder; empty if there is none."""
    adapter = adapter_paths(modelpool, name)
    path = adapter[1] if adapter else checkpoint_path(modelpool, name)
    if path is None or not any((path / file).is_file() for file in _TOKENIZER_FILES):
        return {}
    return AutoTokenizer.from_pretrained(str(path)).get_vocab()


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
