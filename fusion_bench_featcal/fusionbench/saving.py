"""Saving one row's model to `merged_model_save_path`."""

import copy
import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.files import check_target, write_atomic
from fusion_bench_featcal.files.tensors import stored_bytes
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import PoolModel, PoolModels
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.models.saving import (
    CARD,
    CardFacts,
    card_text,
    correct_configs,
    writing_model,
)
from fusion_bench_featcal.results import Run

log = logging.getLogger(__name__)

SAVE_PATH, OPTIONS = "merged_model_save_path", "merged_model_save_kwargs"
_ADVICE = (
    "Make room, or choose another folder. With method.checkpoint_dir and method.resume=true a "
    "calibration continues after its last finished block"
)


def target_of(program: Any) -> Path | None:
    """Return a program's path for the model, or None to save nothing."""
    path = getattr(program, SAVE_PATH, None)
    if path is None:
        return None
    log_dir = str(getattr(program, "log_dir", None))
    return Path(str(path).replace("{log_dir}", log_dir)).expanduser().absolute()


def _options_of(program: Any) -> dict[str, Any]:
    return dict(plain(getattr(program, OPTIONS, None)) or {})


def check_save_target(program: Any, modelpool: BaseModelPool) -> None:
    """Check target and options of the save, before anything is loaded.

    Raises:
        ValueError: If the target exists, or the pool does not take an option.
        ReportError: If the folder cannot be written.
    """
    target, options = target_of(program), _options_of(program)
    if target is None:
        return
    try:
        if text_kind(modelpool) != "seq2seq":  # its `save_pretrained` accepts any option
            inspect.signature(modelpool.save_model).bind(None, "", **options)
    except TypeError as error:
        kind = type(modelpool).__name__
        raise ValueError(f"{OPTIONS}: {kind} cannot save with {options} ({error})") from error
    check_target(target, SAVE_PATH)


def save_model(
    modelpool: BaseModelPool,
    model: Any,
    path: str | os.PathLike[str],
    processor: Any = None,
    **options: Any,
) -> None:
    """Save a model with its processor atomically. The model is not changed.

    FusionBench would save a CLIP vision model without its processor, and an encoder-decoder as a
    pickled state dict.

    Args:
        modelpool: Its `save_model` writes the weights.
        model: The model.
        path: A new folder (a file if the pool saves a state dict).
        processor: Tokenizer or image processor, which is saved if it has `save_pretrained`.
        **options: Further options of the pool's `save_model`.

    Raises:
        CalibrationError: If it cannot be written.
    """
    target = Path(path).expanduser().absolute()
    if options.get("model_dtype") is not None:  # FusionBench's pools convert the model in place
        model = copy.deepcopy(model)
    needed = stored_bytes(model.state_dict().values())
    with writing_model(target, needed, option=f"{SAVE_PATH}={target}", advice=_ADVICE) as new:
        if text_kind(modelpool) == "seq2seq":
            model.save_pretrained(str(new), **options)
        else:
            modelpool.save_model(model, str(new), **options)
        if new.is_dir() and hasattr(processor, "save_pretrained"):
            processor.save_pretrained(new)
        if new.is_dir():
            correct_configs(model, new)
    log.info("saved the model to %s", target)


class RowSaver:
    """Saves one row's model. FusionBench would save it only after all evaluations.

    Attributes:
        row: The row that is saved.
        model: Its model, available after `offer`.
        folder: Folder of the saved model, or None if it is not saved.
    """

    model: nn.Module

    def __init__(self, program: Any, modelpool: BaseModelPool, processor: Any, row: str) -> None:
        """Prepare to save. `check_save_target` has checked the target."""
        self.row = row
        self.folder: Path | None = None
        self._program, self._modelpool, self._processor = program, modelpool, processor
        self._facts = CardFacts(row)

    def offer(self, model: nn.Module, facts: CardFacts) -> None:
        """Store the model if it belongs to `row`, and save it if there is a target.

        Raises:
            CalibrationError: If it cannot be written, naming path, free space and setting.
        """
        if facts.row != self.row:
            return
        self.model, target = model, target_of(self._program)
        self._facts = replace(facts, **{name: plain(value) for name, value in vars(facts).items()})
        if target is not None:
            options = _options_of(self._program)
            save_model(self._modelpool, model, target, self._processor, **options)
            self.folder = target
        if self._program is not None:  # FusionBench would save the model again
            self._program.save_merged_model = lambda merged_model: None

    def finish(self, report: Run) -> None:
        """Add a model card with the run's accuracies to a saved folder."""
        if self.folder is None or not self.folder.is_dir():
            return
        models = PoolModels(self._modelpool)
        base = None if models.base is None else _location(models.base)
        experts = {name: _location(model) for name, model in models.experts.items()}
        write_atomic(self.folder / CARD, card_text(self._facts, base, experts, report), SAVE_PATH)


def _location(model: PoolModel) -> str:
    """Return the folder, hub id or class of a pool's model."""
    kind = type(model.entry).__name__ if model.module is not None else plain(model.entry)
    is_config = isinstance(kind, Mapping)
    return model.location or (str(kind.get("_target_")) if is_config else str(kind))
