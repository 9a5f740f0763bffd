"""Models whose vocabulary matrices differ from the merged model's in rows, or in being tied."""

from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.model_config import complete_config
from fusion_bench_featcal.experts.source import ExpertSource, SourceView, rows_of

VOCABULARY = (
    "embed_tokens.weight", "shared.weight", "wte.weight", "word_embeddings.weight",
    "embed_in.weight", "embed_out.weight", "lm_head.weight", "lm_head.bias",
)  # fmt: skip
"""Ends of the names of tensors with one row per token."""
_SAMPLE = 64


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
        more = rows_of(self._more, other, len(tensor), self._rows)
        return torch.cat([tensor, more.to(tensor)])


def _same_end(name: str, source: ExpertSource) -> str:
    """Return a source's name of a vocabulary matrix, which may have another prefix or be tied."""
    end = next(end for end in VOCABULARY if name.endswith(end))
    names = sorted(name for name in source.names() if name.endswith(VOCABULARY))
    return next((other for other in names if other.endswith(end)), names[0])


def keep_common_rows(model: nn.Module, rows: int, label: str) -> nn.Module:
    """Cut a model's vocabulary matrices to their first rows, in place.

    Args:
        model: A transformers model.
        rows: Number of rows to keep.
        label: Name of the model in messages.

    Returns:
        The model.

    Raises:
        CalibrationError: If it has fewer rows.
    """
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    have = len(embeddings.weight)
    if have < rows:
        raise CalibrationError(f"{label} has {have} rows of embeddings, fewer than {rows}")
    if have > rows:
        model.resize_token_embeddings(rows, mean_resizing=False)  # type: ignore[operator]
    return model


def tied_head(label: str, source: Any, model: Any) -> dict[str, list[str]]:
    """Return {head: [embedding]} if only a source's head is its embedding, not the model's.

    Args:
        label: Name of the source in messages.
        source: An expert's weights.
        model: The model whose structure runs them.

    Raises:
        CalibrationError: If only the model's head is its embedding, or the source scales features
            because of its tie, as T5 does.
    """
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    config = complete_config(getattr(source, "config", None))
    if (head := find()) is None or config is None:
        return {}
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    embedding, name = names[id(model.get_input_embeddings())], names[id(head)]
    is_tied, stored = config.get("tie_word_embeddings"), source.names()
    if head.weight is model.get_input_embeddings().weight:
        if is_tied is False and stored.issuperset((embedding, name)):
            _refuse_separate_head(label, source, embedding, name)
        return {}
    if name in stored or not is_tied:
        return {}
    if config.get("is_encoder_decoder"):
        raise CalibrationError(
            f"{label} has its embedding as head (tie_word_embeddings=true) and scales features for "
            f"it, and the merged model has a separate {name}: merge models with heads of one kind"
        )
    return {name: [embedding]}


def _refuse_separate_head(label: str, source: Any, embedding: str, head: str) -> None:
    if not torch.equal(*(rows_of(source, name, 0, _SAMPLE) for name in (embedding, head))):
        raise CalibrationError(
            f"{label} has a separate head ({head}), and the merged model's is its embedding "
            "(tie_word_embeddings=true): merge models with heads of one kind"
        )
