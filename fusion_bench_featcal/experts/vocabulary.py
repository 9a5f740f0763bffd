"""Models whose vocabulary matrices differ from the merged model's in rows, or in being tied."""

from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.experts.model_config import complete_config
from fusion_bench_featcal.experts.source import ExpertSource, SourceView

VOCABULARY = (
    "embed_tokens.weight", "shared.weight", "wte.weight", "word_embeddings.weight",
    "embed_in.weight", "embed_out.weight", "lm_head.weight", "lm_head.bias",
)  # fmt: skip
"""Ends of the names of tensors with one row per token."""


class VocabularyRows(SourceView):
    """A model's weights with another number of rows in vocabulary matrices.

    Each row belongs to a token. The tokenizers number the common tokens equally, and no other token
    reaches the model.
    """

    def __init__(self, source: ExpertSource, rows: int, more: ExpertSource | None = None) -> None:
        """Wrap a source.

        Args:
            source: The weights.
            rows: Number of rows.
            more: Source of the rows that the weights lack. Without it they are only cut.
        """
        super().__init__(source)
        self._rows, self._more = rows, more

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor with the new number of rows."""
        shape = super().shape(name)
        if not name.endswith(VOCABULARY):
            return shape
        rows = self._rows if self._more is not None else min(shape[0], self._rows)
        return (rows, *shape[1:])

    def tensor(self, name: str) -> Tensor:
        """Return one tensor with the new number of rows."""
        tensor = super().tensor(name)
        if not name.endswith(VOCABULARY):
            return tensor
        if self._more is None or len(tensor) >= self._rows:
            return tensor[: self._rows]
        other = name if name in self._more.names() else _same_end(name, self._more)
        more = self._more.rows(other, len(tensor), self._rows)
        return torch.cat([tensor, more.to(tensor)])


def _same_end(name: str, source: ExpertSource) -> str:
    """Return a source's name of a vocabulary matrix, which may have another prefix or be tied."""
    end = next(end for end in VOCABULARY if name.endswith(end))
    names = sorted(name for name in source.names() if name.endswith(VOCABULARY))
    return next((other for other in names if other.endswith(end)), names[0])


def tied_head(source: ExpertSource, model: Any) -> dict[str, list[str]]:
    """Return {head: [embedding]} if only a source's head is its embedding, not the model's.

    Args:
        source: An expert's weights.
        model: The model whose structure runs them.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    config = complete_config(source.config)
    if head is None or config is None or not config.get("tie_word_embeddings"):
        return {}
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    embedding, name = names[id(model.get_input_embeddings())], names[id(head)]
    is_tied = head.weight is model.get_input_embeddings().weight or name in source.names()
    return {} if is_tied else {name: [embedding]}
