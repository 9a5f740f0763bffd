"""Saving a run's model as soon as it is made, before anything is evaluated."""

import logging
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.boundary.checkpoints import reason
from fusion_bench_featcal.boundary.model_card import CardFacts, model_card
from fusion_bench_featcal.boundary.save_target import OPTIONS, save_options, save_target
from fusion_bench_featcal.boundary.saving import CARD, CompleteSaver, is_our_card
from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)


class RowSaver:
    """Saves one row's model to `merged_model_save_path`, in place of FusionBench.

    FusionBench would save only when the method has returned, after all evaluations.

    Attributes:
        row: The row that is saved.
        folder: Where it was saved; None: it was not.
    """

    def __init__(self, program: Any, modelpool: BaseModelPool, processor: Any, row: str) -> None:
        """Prepare; the target was checked by `check_save_target`.

        Args:
            program: The running program; None: nothing is saved.
            modelpool: The pool, which gets a `save_model` that saves the processor too.
            processor: The processor or tokenizer; None: there is none.
            row: The row to save.
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
        """Save a row's model if it is the one to be saved.

        Raises:
            CalibrationError: If it cannot be written, naming path, room and setting.
        """
        if facts.row != self.row or self._target is None:
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
