"""Saving a calibrated model with its processor or tokenizer, whole or not at all."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from fusion_bench.modelpool import BaseModelPool
from torch import nn

from fusion_bench_featcal.boundary.tokenizers import text_kind

log = logging.getLogger(__name__)


class CompleteSaver:
    """A pool's `save_model` that also saves the processor and leaves nothing half-written.

    FusionBench saves a CLIP vision model without the processor that its inputs need, and an
    encoder-decoder as a pickled state dict. Everything is written to a neighbouring folder first
    and moved into place when complete.
    """

    def __init__(self, modelpool: BaseModelPool, processor: Any) -> None:
        """Take over from a pool.

        Args:
            modelpool: The pool, whose own `save_model` still does the saving.
            processor: Saved beside the model if it has `save_pretrained`; None: nothing more.
        """
        encoder_decoder = text_kind(modelpool) == "seq2seq"
        self._save_model = _save_pretrained if encoder_decoder else modelpool.save_model
        self._processor = processor

    def __call__(self, model: nn.Module, path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save a model.

        Args:
            model: The model.
            path: Folder (or, for pools that save a state dict, file) to write.
            **kwargs: The pool's own options.
        """
        target = Path(path)
        partial = target.with_name(f".{target.name}.part")
        _remove(partial)
        try:
            self._save_model(model, str(partial), **kwargs)
            if partial.is_dir():
                keep_untied(model, partial)
                if hasattr(self._processor, "save_pretrained"):
                    self._processor.save_pretrained(partial)
            _move(partial, target)
        finally:
            _remove(partial)
        log.info("saved the calibrated model to %s", target)


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


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _move(partial: Path, target: Path) -> None:
    """Put a complete folder or file in place; in an existing folder, file by file.

    The folder may hold other things (a log directory), which stay; weights of an older model would
    be loaded in place of the new ones, so they go.
    """
    if not (partial.is_dir() and target.is_dir()):
        os.replace(partial, target)
        return
    for pattern in ("*.safetensors", "*.safetensors.index.json", "pytorch_model*"):
        for stale in target.glob(pattern):
            stale.unlink()
    for file in partial.iterdir():
        os.replace(file, target / file.name)
