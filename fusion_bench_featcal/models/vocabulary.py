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
        others = sorted(other for other in self._more.names() if other.endswith(VOCABULARY))
        end = next(end for end in VOCABULARY if name.endswith(end))
        # The same matrix may have another prefix there, or be tied.
        others.sort(key=lambda other: (other != name, not other.endswith(end)))
        more = self._more.rows(others[0], len(tensor), self._rows)
        return torch.cat([tensor, more.to(tensor)])
