"""Target and options of saving, checked before anything is loaded."""

import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool

from fusion_bench_featcal.files import clear_leftovers, free_space
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import PoolModels
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.plurals import bytes_text
from fusion_bench_featcal.results import prepare_directory
from fusion_bench_featcal.results.provenance import PROVENANCE
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tensor_files import stored_bytes

SAVE_PATH, OPTIONS = "merged_model_save_path", "merged_model_save_kwargs"
_UPLOAD = ("token", "private", "commit_message", "commit_description", "revision", "create_pr")
_LONGEST_NAME = 190  # bytes; a temporary name beside it has up to 60 more
# Weights that would be loaded in place of, or together with, those of a new model.
MODEL_FILES = (
    "model*.safetensors", "model*.safetensors.index.json", "pytorch_model*", "tf_model*",
    "flax_model*", "adapter_*", "open_clip_*", "*_corrections.safetensors", "*_corrections.json",
    PROVENANCE,
)  # fmt: skip


@dataclass(frozen=True)
class SaveOptions:
    """A program's `merged_model_save_path` and `merged_model_save_kwargs`."""

    target: Path | None  # absolute; None: nothing is saved
    card: bool  # write a model card
    repo_id: str | None  # repository on the hub to push to; None: do not push
    upload: Mapping[str, Any]  # options of the push
    pool: Mapping[str, Any]  # options of the pool's own `save_model`


def save_options(program: Any) -> SaveOptions:
    """Return a program's target and options of saving.

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
    """Check target, options and free space; remove what killed processes left at the target.

    Raises:
        ValueError: If the path or an option is not usable, naming the setting.
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
    clear_leftovers(target, MODEL_FILES)
    needed, free = _base_bytes(modelpool), free_space(parent)
    if needed > free:
        raise CalibrationError(
            f"{SAVE_PATH}: {parent} has {bytes_text(free)} free, and a model of the base's size "
            f"takes {bytes_text(needed)}. Make room, or choose a folder on another disk"
        )


def _check_path(target: Path, text: str, modelpool: BaseModelPool) -> None:
    here, problem = Path.cwd(), ""
    saves_file = type(modelpool).save_model is BaseModelPool.save_model
    if not text.strip():
        problem = "is empty"
    elif "{" in text.replace("{log_dir}", "") or "{log_dir}" in str(target):
        problem = "has unknown braces: only {log_dir}, the log directory, is replaced"
    elif target == here or target in here.parents:
        problem = f"is the current folder or one above it ({target}), which would be replaced"
    elif len(target.name.encode()) > _LONGEST_NAME:
        problem = f"is too long: a folder's name may have {_LONGEST_NAME} bytes"
    elif os.path.ismount(target):
        problem = "is a mount point, which cannot be replaced as a whole"
    elif target.is_file() and not saves_file:
        problem = "is a file, and the model is saved as a folder"
    for name in modelpool.all_model_names:
        for folder in _folders(modelpool._models[name]):
            if target == folder or target in folder.parents or folder in target.parents:
                problem = problem or f"is in or above the folder of modelpool.models.{name}"
    if problem:
        raise ValueError(f"{SAVE_PATH}={text!r} {problem}. Choose a new folder")


def _check_options(options: SaveOptions, modelpool: BaseModelPool) -> None:
    if text_kind(modelpool) == "seq2seq":  # saved by its own `save_pretrained`, which takes any
        return
    signature = inspect.signature(modelpool.save_model)
    try:
        signature.bind(None, "", **options.pool)
    except TypeError as error:
        raise ValueError(
            f"{OPTIONS}: {type(modelpool).__name__} cannot save with {dict(options.pool)} "
            f"({error}). It takes push_to_hub, repo_id, model_card and, of its own, "
            f"{', '.join([*signature.parameters][2:]) or 'nothing'}"
        ) from error


def _folders(entry: Any) -> Iterator[Path]:
    """Yield the local folders in a pool's entry."""
    if isinstance(entry, Mapping):
        for value in plain(entry).values():
            yield from _folders(value)
    elif isinstance(entry, str) and Path(entry).is_dir():
        yield Path(entry).resolve()


def _base_bytes(modelpool: BaseModelPool) -> int:
    """Return the bytes of the base, or of the first model without a base; 0: unknown."""
    models = PoolModels(modelpool)
    model = models.base or next(iter(models.values()), None)
    if model is None:
        return 0
    if model.module is not None:
        return stored_bytes(model.module.state_dict().values())
    models.fetch()  # all at once, and not only this one
    return sum(f.stat().st_size for f in model.folders for f in f.glob("*.safetensors"))
