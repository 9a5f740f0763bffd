"""The place and the options of saving, checked before anything is loaded."""

import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool

from fusion_bench_featcal.files import clear_leftovers, free_space, remove, temporary_neighbour
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import PoolModels
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.results import prepare_directory
from fusion_bench_featcal.results.provenance import PROVENANCE
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tensor_files import stored_bytes

SAVE_PATH, OPTIONS = "merged_model_save_path", "merged_model_save_kwargs"
_UPLOAD = ("token", "private", "commit_message", "commit_description", "revision", "create_pr")
# Weights that would be loaded in place of, or together with, those of a new model.
MODEL_FILES = (
    "model*.safetensors", "model*.safetensors.index.json", "pytorch_model*", "tf_model*",
    "flax_model*", "adapter_*", "open_clip_*", "*_corrections.safetensors", "*_corrections.json",
    PROVENANCE,
)  # fmt: skip


@dataclass(frozen=True)
class SaveOptions:
    """Place and options of saving, from a program's `merged_model_save_path` and `..._kwargs`."""

    target: Path | None  # absolute; None: nothing is saved
    card: bool  # whether a model card is written
    repo_id: str | None  # the hub's repository to push to; None: the model stays local
    upload: Mapping[str, Any]  # of the push
    own: Mapping[str, Any]  # of the pool's own `save_model`


def save_options(program: Any) -> SaveOptions:
    """Return where and how a program saves its model.

    Raises:
        ValueError: If a value is of the wrong type.
    """
    path, target = getattr(program, SAVE_PATH, None), None
    if path is not None:
        log_dir = getattr(program, "log_dir", None)
        text = str(path) if log_dir is None else str(path).replace("{log_dir}", str(log_dir))
        target = Path(text).expanduser().resolve()
    options = dict(plain(getattr(program, OPTIONS, None)) or {})
    card, push = options.pop("model_card", True), options.pop("push_to_hub", False)
    for name, value in (("model_card", card), ("push_to_hub", push)):
        if not isinstance(value, bool):
            raise ValueError(f"{OPTIONS}.{name} must be true or false, got {value!r}")
    repo_id = options.pop("repo_id", None) or (target.name if target else "")
    upload = {name: options.pop(name) for name in _UPLOAD if push and name in options}
    return SaveOptions(target, card, str(repo_id) if push else None, upload, options)


def check_save_target(program: Any, modelpool: BaseModelPool) -> None:
    """Refuse a place that the model could not be saved to; clear what dead processes left there.

    Raises:
        ValueError: If the path or an option cannot be meant, naming the setting.
        ReportError: If the folder cannot be written.
        CalibrationError: If the disk has too little room.
    """
    options = save_options(program)
    target = options.target
    if target is None:
        return
    _check_options(options, modelpool)
    _check_path(target, str(program.merged_model_save_path), modelpool)
    parent = prepare_directory(target.parent, SAVE_PATH)
    _check_name(target)
    clear_leftovers(target, MODEL_FILES)
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
    if isinstance(entry, Mapping):
        for value in plain(entry).values():
            yield from _folders(value)
    elif isinstance(entry, str) and Path(entry).is_dir():
        yield Path(entry).resolve()


def _base_bytes(modelpool: BaseModelPool) -> int:
    """Return the bytes of the base model, or of the first one; 0 where it does not tell."""
    models = PoolModels(modelpool)
    model = models.base or next(iter(models.values()), None)
    if model is None or (model.module is None and not model.folders):
        return 0
    if model.module is not None:
        return stored_bytes(model.module.state_dict().values())
    folder = model.folders[0]
    files = list(folder.glob("*.safetensors")) or folder.glob("*.bin")
    return sum(file.stat().st_size for file in files)
