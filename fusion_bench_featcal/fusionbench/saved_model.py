"""Saving one model to `merged_model_save_path`."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool
from fusion_bench.programs import FabricModelFusionProgram
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from fusion_bench_featcal.errors.masking import public
from fusion_bench_featcal.files import check_target, destination, write_atomic
from fusion_bench_featcal.files.locks import locked_target
from fusion_bench_featcal.files.tensors import stored_bytes
from fusion_bench_featcal.fusionbench.pool_models import MERGED_MODEL, PoolModel, PoolModels
from fusion_bench_featcal.fusionbench.run_settings import plain_config
from fusion_bench_featcal.models.bases import read_local
from fusion_bench_featcal.models.cards import CARD, CardHead, card_tags, card_text
from fusion_bench_featcal.models.plan import check_room
from fusion_bench_featcal.models.saving import correct_configs, writing_model
from fusion_bench_featcal.results import Frame
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.results.sentences import compare_repair

log = logging.getLogger(__name__)

SAVE_PATH, OPTIONS = "merged_model_save_path", "merged_model_save_kwargs"
_ADVICE = (
    "Make room, or choose another folder. With method.checkpoint_dir and method.resume=true a "
    "calibration continues after its last finished block"
)


def job_folder(log_dir: str | None) -> str | None:
    """Return the current job's log directory: in a sweep, a subfolder with the job's number."""
    config = HydraConfig.get() if HydraConfig.initialized() else None
    if log_dir is None or config is None or config.mode != RunMode.MULTIRUN:
        return log_dir
    return str(Path(log_dir, str(config.job.num)))


def path_option(program: FabricModelFusionProgram | None, name: str) -> Path | None:
    """Return a path of FusionBench's program, such as `merged_model_save_path`, or None."""
    path = getattr(program, name, None)
    if path is None:
        return None
    log_dir = job_folder(getattr(program, "log_dir", None))
    return destination(str(path).replace("{log_dir}", str(log_dir))).absolute()


def check_save_target(program: FabricModelFusionProgram) -> None:
    """Check the target of the save, before anything is loaded.

    Raises:
        ValueError: If the target exists, or there are options for FusionBench's save.
        CalibrationError: If another run saves there.
        ReportError: If the folder cannot be written.
    """
    target = path_option(program, SAVE_PATH)
    if target is None:
        return
    if getattr(program, OPTIONS, None):
        raise ValueError(
            f"{OPTIONS} has no effect, because a model is always saved in its dtype, with its "
            "tokenizer or processor, and never uploaded. Leave it out"
        )
    with locked_target(target, SAVE_PATH):  # removes what a killed run has left
        check_target(target, SAVE_PATH)


def check_disks(
    program: FabricModelFusionProgram | None,
    models: PoolModels,
    checkpoint_dirs: Iterable[str | None],
) -> None:
    """Check that the disks have enough room for the saved model and the finished blocks.

    Raises:
        CalibrationError: If a disk has too little room.
    """
    sizes = (model.file_bytes for model in models.values())
    size = max(filter(None, sizes), default=None)  # adapters are smaller
    folders = [path_option(program, SAVE_PATH), *checkpoint_dirs]
    check_room({str(folder): size for folder in folders if folder})


def save_model(
    modelpool: BaseModelPool, model: Any, path: str | os.PathLike[str], processor: Any = None
) -> None:
    """Save a model with its processor atomically.

    FusionBench would save a CLIP vision model without its processor, and an encoder-decoder as a
    pickled state dict.

    Args:
        modelpool: The pool. Its `save_model` writes a model that has no `save_pretrained`.
        model: The model.
        path: A new folder, or a new file if the pool saves a state dict.
        processor: Tokenizer or image processor, which is saved if it has `save_pretrained`.

    Raises:
        CalibrationError: If the model cannot be written.
    """
    target = destination(os.fspath(path)).absolute()
    needed = stored_bytes(model.state_dict().values())
    with (
        locked_target(target, SAVE_PATH),
        writing_model(target, needed, option=f"{SAVE_PATH}={target}", advice=_ADVICE) as new,
    ):
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(str(new))
        else:
            modelpool.save_model(model, str(new))
        if new.is_dir() and hasattr(processor, "save_pretrained"):
            processor.save_pretrained(new)
        if new.is_dir():
            correct_configs(model, new)
    log.info("saved the model to %s", target)


def write_card(
    folder: Path, pool: BaseModelPool, name: str, facts: Facts, frame: Frame, **more: Any
) -> None:
    """Add a card to the folder of a saved model. `more` are further arguments of `card_text`."""
    models = PoolModels(pool)
    base = None if models.base is None else _location(models.base)
    experts = {name: _location(model) for name, model in models.experts.items()}
    folders = models[MERGED_MODEL].folders if MERGED_MODEL in models else ()
    tags = [tag for files in folders for tag in card_tags(files.folder)]
    line = next((line for line in frame.lines if line.first.name == name and line.gain), None)
    if line is not None:
        more["scores"] = compare_repair(line, frame)
    kinds = read_local(str(folder), "config.json").get("architectures") or [None]
    head = CardHead(model_class=kinds[0], tags=tags)
    text = card_text(name, facts, base, experts, frame, head=head, **more)
    write_atomic(folder / CARD, text, SAVE_PATH)


def _location(model: PoolModel) -> str:
    """Return the folder, hub id or config of a pool's model."""
    if model.module is not None:
        return f"a {type(model.module).__name__} in memory"
    return model.location or str(public(plain_config(model.entry)))
