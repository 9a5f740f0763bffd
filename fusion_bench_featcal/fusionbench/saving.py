"""Saving models of a pool, with processor, model card and provenance."""

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.fusionbench.save_target import (
    MODEL_FILES,
    OPTIONS,
    SAVE_PATH,
    save_options,
)
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.saved_model import (
    CARD,
    CardFacts,
    card_text,
    complete_folder,
    is_our_card,
    writing_model,
)
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

_ADVICE = (
    "Make room, or choose another folder. With method.checkpoint_dir and method.resume=true a "
    "calibration continues after its last finished block"
)


class CompleteSaver:
    """A pool's `save_model` that also saves the processor and leaves nothing half-written.

    FusionBench saves a CLIP vision model without the processor that its inputs need, and an
    encoder-decoder as a pickled state dict.
    """

    def __init__(self, modelpool: BaseModelPool, processor: Any) -> None:
        """Wrap a pool's `save_model`; the processor is saved if it has `save_pretrained`."""
        save: Any = modelpool.save_model
        save = save._save_model if isinstance(save, CompleteSaver) else save
        self._save_model = _save_pretrained if text_kind(modelpool) == "seq2seq" else save
        self._processor = processor

    def __call__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        *,
        card: str | None = None,
        facts: CardFacts | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Save a model, which is not changed, to a folder (a file where pools save a state dict).

        Args:
            model: The model.
            path: The folder.
            card: Text of a README.md, unless the folder has one that somebody else wrote.
            facts: The model's origin, for a provenance.json.
            **kwargs: The pool's own options.

        Returns:
            The model's files, relative to the folder.

        Raises:
            CalibrationError: If it cannot be written. An older model stays complete.
        """
        target, files = Path(path).expanduser().resolve(), [""]
        if kwargs.get("model_dtype") is not None:  # FusionBench's pools convert the model in place
            model = copy.deepcopy(model)
        option, dropped = f"{SAVE_PATH}={target}", MODEL_FILES
        with writing_model(target, model, option=option, advice=_ADVICE, dropped=dropped) as new:
            self._save_model(model, str(new), **kwargs)
            if new.is_dir():
                files = complete_folder(new, model, self._processor, facts, card)
                if (target / CARD).is_file() and not is_our_card(target / CARD):
                    (new / CARD).unlink(missing_ok=True)  # the other one is carried over
                    files = [name for name in files if name != CARD]
        log.info("saved the model to %s", target)
        return files


def _save_pretrained(model: Any, path: str, **options: Any) -> None:
    model.save_pretrained(path, **options)


class RowSaver:
    """Saves one row's model to `merged_model_save_path`, in place of FusionBench.

    FusionBench would save only when the method has returned, after all evaluations.

    Attributes:
        row: The row that is saved.
        model: Its model, from `offer` on.
        folder: Folder of the saved model; None: not saved.
    """

    model: nn.Module

    def __init__(self, program: Any, modelpool: BaseModelPool, processor: Any, row: str) -> None:
        """Prepare to save; `check_save_target` has checked the target.

        The pool gets a `save_model` that saves the processor too. Without a program nothing is
        saved.
        """
        self.row = row
        self.folder: Path | None = None
        self._program, self._modelpool = program, modelpool
        self._options = save_options(program)
        self._facts = CardFacts(row)
        self._files: list[str] = []
        self._save = CompleteSaver(modelpool, processor)
        modelpool.save_model = self._save  # type: ignore[method-assign]

    def saves(self, row: str) -> bool:
        """Return whether a row's model will be saved."""
        return row == self.row and self._options.target is not None

    def offer(self, model: nn.Module, facts: CardFacts) -> None:
        """Take a row's model if it is the one to be saved, and save it if there is a target.

        Raises:
            CalibrationError: If it cannot be written, naming path, room and setting.
        """
        if facts.row != self.row:
            return
        self.model = model
        self._facts = replace(facts, **{k: plain(v) for k, v in vars(facts).items()})
        options = self._options
        if options.target is not None:
            card = self._card() if options.card else None
            self._files = self._save(
                model, options.target, card=card, facts=self._facts, **options.pool
            )
            self.folder = options.target
        if self._program is not None:  # which would save it again
            self._program.save_merged_model = lambda merged_model: None

    def finish(self, report: Report) -> None:
        """Add the run's accuracies to the model card; push the folder if `push_to_hub` is set.

        Raises:
            CalibrationError: If the model cannot be pushed; the saved one stays.
        """
        if self.folder is None:
            return
        readme = self.folder / CARD
        if self._options.card and is_our_card(readme):
            write_atomic(readme, self._card(report), OPTIONS)
        if self._options.repo_id is not None:
            self._push(self.folder, self._options.repo_id)

    def _card(self, report: Report | None = None) -> str:
        pool = self._modelpool
        base = _location(pool, BASE_MODEL) if pool.has_pretrained else None
        experts = {name: _location(pool, name) for name in pool.model_names}
        tags = ("merge", "fusion-bench", "featcal")
        return card_text(self._facts, base, experts, report, tags=tags)

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
                f"{first_line(error)}. Push it by: hf upload {repo_id} {folder}. The repository is "
                f"chosen by {OPTIONS}.repo_id"
            ) from error
        log.info("pushed %s to %s", folder, made.repo_id)


def _location(modelpool: BaseModelPool, name: str) -> str:
    """Return the folder, hub id or class of a pool's model."""
    entry = plain(modelpool._models[name])
    if isinstance(entry, Mapping):
        keys = ("peft_model_path", "pretrained_model_name_or_path", "base_model_path", "_target_")
        entry = next((entry[key] for key in keys if key in entry), name)
    return entry if isinstance(entry, str) else type(entry).__name__
