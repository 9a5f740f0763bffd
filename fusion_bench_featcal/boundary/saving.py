"""Saving a model with its processor or tokenizer, whole or not at all."""

import copy
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fusion_bench.modelpool import BaseModelPool
from safetensors import SafetensorError
from torch import Tensor, nn

from fusion_bench_featcal.boundary.checkpoints import reason
from fusion_bench_featcal.boundary.replacing import replacing
from fusion_bench_featcal.boundary.tokenizers import text_kind
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

SAVE_PATH = "merged_model_save_path"


class CompleteSaver:
    """A pool's `save_model` that also saves the processor and leaves nothing half-written.

    FusionBench saves a CLIP vision model without the processor that its inputs need, and an
    encoder-decoder as a pickled state dict. Everything is written to a new folder first, which
    then replaces the old one.
    """

    def __init__(self, modelpool: BaseModelPool, processor: Any) -> None:
        """Take over from a pool.

        Args:
            modelpool: The pool, whose own `save_model` still does the saving.
            processor: Saved beside the model if it has `save_pretrained`; None: nothing more.
        """
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
        """Save a model.

        Args:
            model: The model; it is not changed.
            path: Folder (or, for pools that save a state dict, file) to write.
            card: Text of a README.md to leave beside the model, unless the folder has one that
                somebody else wrote; None: none.
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
            with replacing(target) as new:
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


CARD = "README.md"
CARD_MARK = "<!-- Written by fusion_bench_featcal. Remove this line to keep your changes. -->"


def is_our_card(file: Path) -> bool:
    """Return whether a model card is one that this package wrote."""
    try:
        return CARD_MARK in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


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

    Args:
        model: The model, saved already.
        folder: Where it was saved.
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
