"""Embedding models of sentence-transformers whose embeddings are one pooling of token states.

Methods and task pools of FusionBench run the transformer alone, and pool its states themselves.
"""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path

from torch import Tensor

from fusion_bench_featcal.data.embeddings import MODES, Pooling
from fusion_bench_featcal.encoders.models import transformer_of
from fusion_bench_featcal.encoders.naming import DEFAULT
from fusion_bench_featcal.encoders.opening import open_model
from fusion_bench_featcal.errors import CalibrationError

_NAMES = {"lasttoken": "last"}


class PooledEncoder:
    """An embedding model, opened by the library.

    Attributes:
        label: Name of the model in messages.
        model: The model.
    """

    def __init__(self, folder: Path, label: str) -> None:
        """Open a folder. Raises a CalibrationError that names the label if it cannot be opened."""
        self.label, self.model = label, open_model(DEFAULT, folder, label)

    @property
    def pooling(self) -> Pooling:
        """The pooling of its tokens' states.

        Raises:
            CalibrationError: If its embeddings are not such a pooling.
        """
        modules = [type(module).__name__ for module in self.model]
        if modules not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise self._error(f"the modules {modules}")
        mode = self.model[1].pooling_mode
        if (mode := _NAMES.get(mode, mode)) not in MODES:
            raise self._error(f"the pooling {mode!r}")
        return Pooling(mode, self.model.max_seq_length)

    def _error(self, reason: str) -> CalibrationError:
        return CalibrationError(
            f"{self.label} has {reason}, but this pool supports only one pooling "
            f"({', '.join(MODES)}) of an encoder's tokens. featcal calibrate takes all "
            "sentence-transformers models"
        )

    def tokenized(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return the transformer's inputs of texts, with the default prompt of `encode`."""
        model = self.model
        prompt = model.prompts.get(model.default_prompt_name or "")
        features = model.preprocess([*texts], prompt=prompt)
        accepted = signature(transformer_of(self.label, model).model.forward).parameters
        return {n: t for n, t in features.items() if n in accepted and isinstance(t, Tensor)}
