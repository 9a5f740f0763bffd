"""Models with more rows in their vocabulary matrices than the other models."""

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.source import ExpertSource, SourceView

VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "shared.weight", "wte.weight")
"""Matrices with one row per token."""


class CommonRows(SourceView):
    """A model's weights with vocabulary matrices cut to their first rows.

    Each row belongs to a token. The tokenizers number the common tokens equally, and no other token
    reaches the model.
    """

    def __init__(self, source: ExpertSource, rows: int) -> None:
        """Wrap a source.

        Args:
            source: The weights.
            rows: Number of tokens common to all models.
        """
        super().__init__(source)
        self._rows = rows

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor after the cut."""
        shape = super().shape(name)
        return (min(shape[0], self._rows), *shape[1:]) if name.endswith(VOCABULARY) else shape

    def tensor(self, name: str) -> Tensor:
        """Return one tensor after the cut."""
        tensor = super().tensor(name)
        return tensor[: self._rows] if name.endswith(VOCABULARY) else tensor


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
