"""Saving one row's model to `merged_model_save_path`: checks before the run, then the folder."""

import copy
import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.plurals import bytes_text
from fusion_bench_featcal.files import clear_leftovers, free_space, prepare_directory, write_atomic
from fusion_bench_featcal.files.tensors import stored_bytes
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import PoolModel, PoolModels
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.models.saving import (
    CARD,
    PROVENANCE,
    CardFacts,
    card_text,
    complete_folder,
    is_our_card,
    writing_model,
)
from fusion_bench_featcal.results import Run

log = logging.getLogger(__name__)

SAVE_PATH, OPTIONS = "merged_model_save_path", "merged_model_save_kwargs"
# Weights that would be loaded instead of, or together with, a new model's weights.
MODEL_FILES = (
    "model*.safetensors", "model*.safetensors.index.json", "pytorch_model*", "tf_model*",
    "flax_model*", "adapter_*", "open_clip_*", "*_corrections.safetensors", "*_corrections.json",
    PROVENANCE,
)  # fmt: skip
_ADVICE = (
    "Make room, or choose another folder. With method.checkpoint_dir and method.resume=true a "
    "calibration continues after its last finished block"
)


@dataclass(frozen=True)
class SaveOptions:
    """A program's `merged_model_save_path` and `merged_model_save_kwargs`."""

    target: Path | None  # absolute, or None to save nothing
    card: bool  # write a model card
    repo_id: str | None  # hub repository that the folder is pushed to, or None
    pool: Mapping[str, Any]  # further options of the pool's `save_model`

    @classmethod
    def of(cls, program: Any) -> "SaveOptions":
        """Read the options of a program, which may be None."""
        path, target = getattr(program, SAVE_PATH, None), None
        if path is not None:
            log_dir = str(getattr(program, "log_dir", None))
            target = _absolute(str(path).replace("{log_dir}", log_dir))
        options = dict(plain(getattr(program, OPTIONS, None)) or {})
        card, repo_id = bool(options.pop("model_card", True)), options.pop("repo_id", None)
        if not options.pop("push_to_hub", False):
            repo_id = None
        elif repo_id is None and target is not None:
            repo_id = target.name
        return cls(target, card, repo_id, options)


def check_save_target(program: Any, modelpool: BaseModelPool) -> None:
    """Check target, options and free space, and remove leftovers of killed processes.

    Raises:
        ValueError: If the path or an option is not usable, naming the setting.
        ReportError: If the folder cannot be written.
        CalibrationError: If the disk has too little room.
    """
    options = SaveOptions.of(program)
    target = options.target
    if target is None:
        return
    problem = _problem_of(options.pool, modelpool)
    if problem:
        raise ValueError(f"{OPTIONS}: {problem}")
    problem = _problem_at(target, modelpool)
    if problem:
        raise ValueError(
            f"{SAVE_PATH}={program.merged_model_save_path!r} {problem}. Choose a new folder"
        )
    parent = prepare_directory(target.parent, SAVE_PATH)
    clear_leftovers(target)
    needed, free = _base_bytes(modelpool), free_space(parent)
    if needed > free:
        raise CalibrationError(
            f"{SAVE_PATH}: {parent} has {bytes_text(free)} free, and a model of the base's size "
            f"takes {bytes_text(needed)}. Make room, or choose a folder on another disk"
        )


def _problem_of(options: Mapping[str, Any], modelpool: BaseModelPool) -> str:
    try:
        if text_kind(modelpool) != "seq2seq":  # its `save_pretrained` accepts any option
            inspect.signature(modelpool.save_model).bind(None, "", **options)
    except TypeError as error:
        return f"{type(modelpool).__name__} cannot save with {dict(options)} ({error})"
    return ""


def _problem_at(target: Path, modelpool: BaseModelPool) -> str:
    here, saves_file = Path.cwd(), type(modelpool).save_model is BaseModelPool.save_model
    if target == here or target in here.parents:
        return f"is the current folder or one above it ({target}), which would be replaced"
    if target.is_symlink():
        return "is a loop of symbolic links"
    if os.path.ismount(target):
        return "is a mount point, which cannot be replaced as a whole"
    if target.is_file() and not saves_file:
        return "is a file, and the model is saved as a folder"
    for name in modelpool.all_model_names:
        for folder in _folders(modelpool._models[name]):
            if target == folder or target in folder.parents or folder in target.parents:
                return f"is in or above the folder of modelpool.models.{name}"
    return ""


def _absolute(path: str | os.PathLike[str]) -> Path:
    """Return a path with links resolved. `Path.resolve` raises an error for a loop of links."""
    return Path(os.path.realpath(Path(path).expanduser()))


def _folders(entry: Any) -> Iterator[Path]:
    """Yield the local folders in a pool's entry."""
    if isinstance(entry, Mapping):
        for value in plain(entry).values():
            yield from _folders(value)
    elif isinstance(entry, str) and Path(entry).is_dir():
        yield Path(entry).resolve()


def _base_bytes(modelpool: BaseModelPool) -> int:
    """Return the bytes of the base (else of the first model), or 0 if unknown."""
    models = PoolModels(modelpool)
    model = models.base or next(iter(models.values()), None)
    if model is None:
        return 0
    if model.module is not None:
        return stored_bytes(model.module.state_dict().values())
    models.fetch()  # fetches all models at once
    return sum(f.stat().st_size for f in model.folders for f in f.glob("*.safetensors"))


def save_model(
    modelpool: BaseModelPool,
    model: Any,
    path: str | os.PathLike[str],
    processor: Any = None,
    *,
    card: str | None = None,
    facts: CardFacts | None = None,
    **options: Any,
) -> list[str]:
    """Save a model with its processor atomically. The model is not changed.

    FusionBench would save a CLIP vision model without its processor, and an encoder-decoder as a
    pickled state dict.

    Args:
        modelpool: Its `save_model` writes the weights.
        model: The model.
        path: The folder (a file if the pool saves a state dict).
        processor: Tokenizer or image processor, which is saved if it has `save_pretrained`.
        card: Text of a README.md, unless the folder has one from another author.
        facts: The model's origin, for a provenance.json.
        **options: Further options of the pool's `save_model`.

    Returns:
        The model's files, relative to the folder.

    Raises:
        CalibrationError: If it cannot be written. An older model stays complete.
    """
    target, files = _absolute(path), [""]
    if options.get("model_dtype") is not None:  # FusionBench's pools convert the model in place
        model = copy.deepcopy(model)
    option = f"{SAVE_PATH}={target}"
    needed = stored_bytes(model.state_dict().values())
    with writing_model(target, needed, option=option, advice=_ADVICE, dropped=MODEL_FILES) as new:
        if text_kind(modelpool) == "seq2seq":
            model.save_pretrained(str(new), **options)
        else:
            modelpool.save_model(model, str(new), **options)
        if new.is_dir():
            files = complete_folder(new, model, processor, facts, card)
            if (target / CARD).is_file() and not is_our_card(target / CARD):
                (new / CARD).unlink(missing_ok=True)  # the existing card is carried over
                files = [name for name in files if name != CARD]
    log.info("saved the model to %s", target)
    return files


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
        self._options = SaveOptions.of(program)
        self._facts = CardFacts(row)
        self._files: list[str] = []

    def saves(self, row: str) -> bool:
        """Return whether a row's model will be saved."""
        return row == self.row and self._options.target is not None

    def offer(self, model: nn.Module, facts: CardFacts) -> None:
        """Store the model if it belongs to `row`, and save it if there is a target.

        Raises:
            CalibrationError: If it cannot be written, naming path, free space and setting.
        """
        if facts.row != self.row:
            return
        self.model = model
        self._facts = replace(facts, **{k: plain(v) for k, v in vars(facts).items()})
        target, pool = self._options.target, self._modelpool
        if target is not None:
            text = self._card() if self._options.card else None
            save_options: dict[str, Any] = {
                "card": text,
                "facts": self._facts,
                **self._options.pool,
            }
            self._files = save_model(pool, model, target, self._processor, **save_options)
            self.folder = target
        if self._program is not None:  # FusionBench would save the model again
            self._program.save_merged_model = lambda merged_model: None

    def finish(self, report: Run) -> None:
        """Add the run's accuracies to the model card. Push the folder if `push_to_hub` is set.

        Raises:
            CalibrationError: If the model cannot be pushed. The saved one stays.
        """
        if self.folder is not None and self._options.card and is_our_card(self.folder / CARD):
            write_atomic(self.folder / CARD, self._card(report), OPTIONS)
        if self.folder is not None and self._options.repo_id is not None:
            self._push(self.folder, self._options.repo_id)

    def _push(self, folder: Path, repo_id: str) -> None:
        from huggingface_hub import HfApi

        try:
            repo_id = HfApi().create_repo(repo_id, exist_ok=True).repo_id
            HfApi().upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=self._files)
        except Exception as error:  # an error of the network, the hub or the token
            raise CalibrationError(
                f"the model is saved in {folder}, but not pushed to {repo_id} "
                f"({OPTIONS}.repo_id): {first_line(error)}. Try: hf upload {repo_id} {folder}"
            ) from error
        log.info("pushed %s to %s", folder, repo_id)

    def _card(self, report: Run | None = None) -> str:
        models = PoolModels(self._modelpool)
        base = None if models.base is None else _location(models.base)
        experts = {name: _location(model) for name, model in models.experts.items()}
        tags = ("merge", "fusion-bench", "featcal")
        return card_text(self._facts, base, experts, report, tags=tags)


def _location(model: PoolModel) -> str:
    """Return the folder, hub id or class of a pool's model."""
    kind = type(model.entry).__name__ if model.module is not None else plain(model.entry)
    return model.location or (str(kind.get("_target_")) if isinstance(kind, dict) else str(kind))
