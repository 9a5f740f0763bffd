"""Saving a model with its processor or tokenizer, whole or not at all."""

import copy
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool
from safetensors import SafetensorError
from torch import nn

from fusion_bench_featcal.files import free_space, replacing, write_atomic
from fusion_bench_featcal.fusionbench.model_card import model_card, plain_facts
from fusion_bench_featcal.fusionbench.pool_models import reason
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
    is_our_card,
    keep_untied,
    write_provenance,
)
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tensor_files import stored_bytes

log = logging.getLogger(__name__)


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
            CalibrationError: If it cannot be written; what was there before stays whole.
        """
        target = Path(path).expanduser().resolve()
        needed = stored_bytes(model.state_dict().values())
        if needed > free_space(target.parent):
            raise _cannot_save(target, needed, "there is too little room")
        if kwargs.get("model_dtype") is not None:  # FusionBench's pools convert the model in place
            model = copy.deepcopy(model)
        try:
            with replacing(target, MODEL_FILES) as new:
                self._save_model(model, str(new), **kwargs)
                files = self._complete(model, new, target, card, facts) if new.is_dir() else [""]
        except (OSError, SafetensorError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or reason(error)
            raise _cannot_save(target, needed, why) from error
        log.info("saved the model to %s", target)
        return files

    def _complete(
        self, model: nn.Module, new: Path, target: Path, card: str | None, facts: CardFacts | None
    ) -> list[str]:
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
        if facts is not None:
            files.append(write_provenance(new, files, plain_facts(facts)))
        return files


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
        self._options = save_options(program)
        self._facts: CardFacts | None = None
        self._files: list[str] = []
        self._save = CompleteSaver(modelpool, processor)
        modelpool.save_model = self._save  # type: ignore[method-assign]

    def saves(self, row: str) -> bool:
        """Return whether a row's model will be saved."""
        return row == self.row and self._options.target is not None

    def offer(self, model: nn.Module, facts: CardFacts) -> None:
        """Take a row's model if it is the one to be saved, and save it where a path is named.

        Raises:
            CalibrationError: If it cannot be written, naming path, room and setting.
        """
        if facts.row != self.row:
            return
        self.model = model
        options = self._options
        if options.target is not None:
            card = model_card(self._modelpool, facts) if options.card else None
            self._files = self._save(model, options.target, card=card, facts=facts, **options.own)
            self.folder, self._facts = options.target, facts
        _skip_saving(self._program, model)

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


def _skip_saving(program: Any, model: nn.Module) -> None:
    """Keep a program from saving a model that is saved already; others it saves as before."""
    if program is None:
        return
    save = program.save_merged_model

    def save_other(merged_model: Any) -> None:
        if merged_model is not model:
            save(merged_model)

    program.save_merged_model = save_other
