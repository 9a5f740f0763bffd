"""Saving a model with its processor or tokenizer, whole or not at all."""

import copy
import inspect
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool
from omegaconf import DictConfig
from safetensors import SafetensorError
from torch import Tensor, nn

from fusion_bench_featcal.files import (
    clear_leftovers,
    remove,
    replacing,
    temporary_neighbour,
    write_atomic,
)
from fusion_bench_featcal.fusionbench.model_card import CARD, CardFacts, is_our_card, model_card
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import (
    BASE_MODEL,
    adapter_paths,
    checkpoint_path,
    reason,
)
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.results import Report, prepare_directory
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)


SAVE_PATH, OPTIONS = "merged_model_save_path", "merged_model_save_kwargs"
# Weights that would be loaded in place of, or together with, those of a new model.
_WEIGHTS = (
    "model*.safetensors", "model*.safetensors.index.json", "pytorch_model*", "tf_model*",
    "flax_model*", "adapter_*", "open_clip_*", "*_corrections.safetensors", "*_corrections.json",
)  # fmt: skip


class CompleteSaver:
    """A pool's `save_model` that also saves the processor and leaves nothing half-written.

    FusionBench saves a CLIP vision model without the processor that its inputs need, and an
    encoder-decoder as a pickled state dict. Everything is written to a new folder first, which
    then replaces the old one.
    """

    def __init__(self, modelpool: BaseModelPool, processor: Any) -> None:
        """Take over from a pool; the processor is saved if it has `save_pretrained`."""
        own: Any = modelpool.save_model
        own = own._save_model if isinstance(own, CompleteSaver) else own
        encoder_decoder = text_kind(modelpool) == "seq2seq"
        self._save_model = _save_pretrained if encoder_decoder else own
        self._processor = processor

    def __call__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        *,
        card: str | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Save a model to a folder (or, for pools that save a state dict, a file).

        Args:
            model: The model; it is not changed.
            path: The folder.
            card: Text of a README.md, unless the folder has one that somebody else wrote.
            **kwargs: The pool's own options.

        Returns:
            The files that belong to the model, relative to the folder.

        Raises:
            CalibrationError: If it cannot be written; what was there before stays whole.
        """
        target = Path(path).expanduser().resolve()
        needed = stored_bytes(model.state_dict().values())
        if needed > free_space(target.parent):
            raise _cannot_save(target, needed, "there is too little room")
        if kwargs.get("model_dtype") is not None:  # FusionBench's pools convert the model in place
            model = copy.deepcopy(model)
        try:
            with replacing(target, _WEIGHTS) as new:
                self._save_model(model, str(new), **kwargs)
                files = self._complete(model, new, target, card) if new.is_dir() else [""]
        except (OSError, SafetensorError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or reason(error)
            raise _cannot_save(target, needed, why) from error
        log.info("saved the model to %s", target)
        return files

    def _complete(self, model: nn.Module, new: Path, target: Path, card: str | None) -> list[str]:
        """Add to a saved model what its pool leaves out."""
        keep_untied(model, new)
        if hasattr(self._processor, "save_pretrained"):
            self._processor.save_pretrained(new)
        files = sorted(str(f.relative_to(new)) for f in new.rglob("*") if f.is_file())
        readme = target / CARD
        if readme.is_file() and not is_our_card(readme):
            shutil.copy2(readme, new / CARD)
        elif card is not None and not (new / CARD).exists():
            (new / CARD).write_text(card, encoding="utf-8")
            files.append(CARD)
        return files


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors, those that share memory counted once."""
    return sum({t.data_ptr() or id(t): t.nbytes for t in tensors if t is not None}.values())


def free_space(folder: Path) -> int:
    """Return the free bytes of the disk that a folder is on or, if it is missing, will be on."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _cannot_save(target: Path, needed: int, why: str) -> CalibrationError:
    free = free_space(target.parent)
    return CalibrationError(
        f"the model cannot be saved to {target}: {why}. It needs {needed / 1e9:.3g} GB, and "
        f"{free / 1e9:.3g} GB are free there; nothing was changed. Make room, or choose another "
        f"folder by {SAVE_PATH}; with method.checkpoint_dir and method.resume=true a calibration "
        "goes on after its last whole block"
    )


def _save_pretrained(model: Any, path: str, **options: Any) -> None:
    model.save_pretrained(path, **options)


def keep_untied(model: Any, folder: Path) -> None:
    """Let a saved config tell that the head is a matrix of its own, where it is.

    transformers 5 gives every T5 a config with `tie_word_embeddings: true`, by which older releases
    would put the embeddings in the head's place and rescale its input.
    """
    file = folder / "config.json"
    if not file.is_file() or not hasattr(model, "get_output_embeddings"):
        return
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embeddings.weight:
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


_UPLOAD = ("token", "private", "commit_message", "commit_description", "revision", "create_pr")


@dataclass(frozen=True)
class SaveOptions:
    """Options in `merged_model_save_kwargs`."""

    card: bool  # whether a model card is written
    repo_id: str | None  # the hub's repository to push to; None: the model stays local
    upload: Mapping[str, Any]  # of the push
    own: Mapping[str, Any]  # of the pool's own `save_model`


def save_target(program: Any) -> Path | None:
    """Return the absolute path that a program saves its model to; None: it saves none."""
    path = getattr(program, SAVE_PATH, None)
    if path is None:
        return None
    log_dir = getattr(program, "log_dir", None)
    text = str(path) if log_dir is None else str(path).replace("{log_dir}", str(log_dir))
    return Path(text).expanduser().resolve()


def save_options(program: Any) -> SaveOptions:
    """Return what a program's `merged_model_save_kwargs` ask for.

    Raises:
        ValueError: If a value is of the wrong type.
    """
    options = dict(plain(getattr(program, OPTIONS, None)) or {})
    card, push = options.pop("model_card", True), options.pop("push_to_hub", False)
    repo_id = options.pop("repo_id", None)
    for name, value in (("model_card", card), ("push_to_hub", push)):
        if not isinstance(value, bool):
            raise ValueError(f"{OPTIONS}.{name} must be true or false, got {value!r}")
    upload = {name: options.pop(name) for name in _UPLOAD if push and name in options}
    target = save_target(program)
    name = str(repo_id or (target.name if target else ""))
    return SaveOptions(card, name if push else None, upload, options)


def check_save_target(program: Any, modelpool: BaseModelPool) -> None:
    """Refuse a place that the model could not be saved to; clear what dead processes left there.

    Raises:
        ValueError: If the path or an option cannot be meant, naming the setting.
        ReportError: If the folder cannot be written.
        CalibrationError: If the disk has too little room.
    """
    target = save_target(program)
    if target is None:
        return
    _check_options(save_options(program), modelpool)
    _check_path(target, str(program.merged_model_save_path), modelpool)
    parent = prepare_directory(target.parent, SAVE_PATH)
    _check_name(target)
    clear_leftovers(target, _WEIGHTS)
    needed, free = _base_bytes(modelpool), free_space(parent)
    if needed > free:
        raise CalibrationError(
            f"{SAVE_PATH}: {parent} has {free / 1e9:.3g} GB free, and a model of the base's size "
            f"takes {needed / 1e9:.3g} GB. Make room, or choose a folder on another disk"
        )


def _check_path(target: Path, text: str, modelpool: BaseModelPool) -> None:
    here, why = Path.cwd(), ""
    saves_file = type(modelpool).save_model is BaseModelPool.save_model
    if not text.strip():
        why = "is empty"
    elif "{" in text.replace("{log_dir}", "") or "{log_dir}" in str(target):
        why = "has braces that stand for nothing: only {log_dir}, the log directory, is replaced"
    elif target == here or target in here.parents:
        why = f"is the current folder or one above it ({target}), which would be replaced"
    elif os.path.ismount(target):
        why = "is a mount point, which cannot be replaced as a whole"
    elif os.path.lexists(target) and not (target.is_dir() or saves_file):
        why = "is a file, and the model is saved as a folder"
    for name in modelpool.all_model_names:
        for folder in _folders(modelpool._models[name]):
            if target == folder or target in folder.parents or folder in target.parents:
                why = why or f"lies in or above the folder of modelpool.models.{name} ({folder})"
    if why:
        raise ValueError(f"{SAVE_PATH}={text!r} {why}. Name a new folder")


def _check_name(target: Path) -> None:
    """Try the name, and that of the temporary folder beside it, which is longer."""
    trial = temporary_neighbour(target)
    try:
        trial.mkdir()
    except OSError as error:
        raise ValueError(
            f"{SAVE_PATH}: {target} cannot be made ({error.strerror or error}). Choose another "
            "name: the temporary folder beside it needs 60 characters more"
        ) from error
    remove(trial)


def _check_options(options: SaveOptions, modelpool: BaseModelPool) -> None:
    if text_kind(modelpool) == "seq2seq":  # saved by its own `save_pretrained`, which takes any
        return
    signature = inspect.signature(modelpool.save_model)
    try:
        signature.bind(None, "", **options.own)
    except TypeError as error:
        raise ValueError(
            f"{OPTIONS}: {type(modelpool).__name__} cannot save with {dict(options.own)} ({error})."
            " It takes push_to_hub, repo_id, model_card and, of its own, "
            f"{', '.join([*signature.parameters][2:]) or 'nothing'}"
        ) from error


def _folders(entry: Any) -> Iterator[Path]:
    """Yield the local folders that a pool's entry names."""
    if isinstance(entry, Mapping | DictConfig):
        for value in plain(entry).values():
            yield from _folders(value)
    elif isinstance(entry, str) and Path(entry).is_dir():
        yield Path(entry).resolve()


def _base_bytes(modelpool: BaseModelPool) -> int:
    """Return the bytes of the base model, or of the first one; 0 where it does not tell."""
    name = BASE_MODEL if modelpool.has_pretrained else next(iter(modelpool.all_model_names), None)
    if name is None:
        return 0
    entry = modelpool._models[name]
    if isinstance(entry, nn.Module):
        return stored_bytes(entry.state_dict().values())
    adapter = adapter_paths(modelpool, name)
    folder = adapter[0] if adapter else checkpoint_path(modelpool, name)
    files = [] if folder is None else list(folder.glob("*.safetensors")) or folder.glob("*.bin")
    return sum(file.stat().st_size for file in files)


class RowSaver:
    """Saves one row's model to `merged_model_save_path`, in place of FusionBench.

    FusionBench would save only when the method has returned, after all evaluations.

    Attributes:
        row: The row that is saved.
        model: Its model, once it is there.
        folder: Where it was saved; None: it was not.
    """

    model: nn.Module

    def __init__(self, program: Any, modelpool: BaseModelPool, processor: Any, row: str) -> None:
        """Prepare; the target was checked by `check_save_target`. Without a program none is saved.

        The pool gets a `save_model` that saves the processor too.
        """
        self.row = row
        self.folder: Path | None = None
        self._program, self._modelpool = program, modelpool
        self._target, self._options = save_target(program), save_options(program)
        self._facts: CardFacts | None = None
        self._files: list[str] = []
        self._save = CompleteSaver(modelpool, processor)
        modelpool.save_model = self._save  # type: ignore[method-assign]

    def offer(self, model: nn.Module, facts: CardFacts) -> None:
        """Take a row's model if it is the one to be saved, and save it where a path is named.

        Raises:
            CalibrationError: If it cannot be written, naming path, room and setting.
        """
        if facts.row != self.row:
            return
        self.model = model
        if self._target is None:
            return
        card = model_card(self._modelpool, facts) if self._options.card else None
        self._files = self._save(model, self._target, card=card, **self._options.own)
        self.folder, self._facts = self._target, facts
        skip_saving(self._program, model)

    def finish(self, report: Report) -> None:
        """Complete the model card with the run's accuracies; push the folder where asked.

        Raises:
            CalibrationError: If the model cannot be pushed; the saved one stays.
        """
        if self.folder is None:
            return
        readme = self.folder / CARD
        if self._facts is not None and self._options.card and is_our_card(readme):
            write_atomic(readme, model_card(self._modelpool, self._facts, report), OPTIONS)
        if self._options.repo_id is not None:
            self._push(self.folder, self._options.repo_id)

    def _push(self, folder: Path, repo_id: str) -> None:
        from huggingface_hub import HfApi

        options = dict(self._options.upload)
        try:
            api = HfApi(token=options.pop("token", None))
            made = api.create_repo(repo_id, private=options.pop("private", None), exist_ok=True)
            api.upload_folder(
                repo_id=made.repo_id, folder_path=folder, allow_patterns=self._files, **options
            )
        except Exception as error:  # of the network, the hub or the token
            raise CalibrationError(
                f"the model is saved in {folder}, but could not be pushed to {repo_id}: "
                f"{reason(error)}. Push it by: hf upload {repo_id} {folder}. The repository is "
                f"chosen by {OPTIONS}.repo_id"
            ) from error
        log.info("pushed %s to %s", folder, made.repo_id)


def skip_saving(program: Any, model: nn.Module) -> None:
    """Keep a program from saving a model that is saved already; others it saves as before."""
    if program is None:
        return
    save = program.save_merged_model

    def save_other(merged_model: Any) -> None:
        if merged_model is not model:
            save(merged_model)

    program.save_merged_model = save_other
