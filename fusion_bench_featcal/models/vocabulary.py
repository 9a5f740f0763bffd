"""Models whose vocabulary matrices differ from the merged model's in rows, or in being tied."""

import torch
from torch import Tensor

from fusion_bench_featcal.experts.source import ExpertSource, SourceView

VOCABULARY = (
    "embed_tokens.weight", "shared.weight", "wte.weight", "word_embeddings.weight",
    "word_embedding.weight", "tok_embeddings.weight", "embed_in.weight", "embed_out.weight",
    "lm_head.weight", "lm_head.bias",
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

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of one tensor. Vocabulary matrices are read whole."""
        source = super() if name.endswith(VOCABULARY) else self._source
        return source.rows(name, start, stop)

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
