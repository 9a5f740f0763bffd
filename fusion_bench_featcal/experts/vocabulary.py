"""Experts with more rows in their vocabulary matrices than the other models have."""

from torch import Tensor, nn

from fusion_bench_featcal.experts import ExpertSource, SourceView
from fusion_bench_featcal.settings import CalibrationError

# Matrices with one row a token, as the model classes of transformers call them.
_ENDINGS = ("embed_tokens.weight", "lm_head.weight", "shared.weight", "wte.weight")


class CommonRows(SourceView):
    """A model's weights, of whose vocabulary matrices only the first rows are seen.

    A row is a token's: the tokenizer gives the common tokens the same numbers everywhere, and no
    other token reaches the model.
    """

    def __init__(self, source: ExpertSource, rows: int) -> None:
        """Refer to a source.

        Args:
            source: The weights.
            rows: Number of tokens that all models know.
        """
        super().__init__(source)
        self._rows = rows

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, as it is seen."""
        first, *rest = self._source.shape(name) or (0,)
        if self._is_cut(name):
            return (min(first, self._rows), *rest)
        return self._source.shape(name)

    def nbytes(self, name: str) -> int:
        """Size of one tensor, as it is seen."""
        stored = super().nbytes(name)
        if not self._is_cut(name):
            return stored
        return stored * self.shape(name)[0] // self._source.shape(name)[0]

    def tensor(self, name: str) -> Tensor:
        """One tensor, as it is seen."""
        tensor = self._source.tensor(name)
        return tensor[: self._rows] if self._is_cut(name) else tensor

    def _is_cut(self, name: str) -> bool:
        return name.endswith(_ENDINGS)


def keep_common_rows(model: nn.Module, rows: int, label: str) -> nn.Module:
    """Cut a model's vocabulary matrices to their first rows, in place.

    Args:
        model: A transformers model.
        rows: Number of rows to keep.
        label: What messages call it.

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
