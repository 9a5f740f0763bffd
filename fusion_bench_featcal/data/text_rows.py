"""Datasets of texts, with places in files for messages, without examples that are left out."""

from collections.abc import Mapping
from typing import Any

import datasets

from fusion_bench_featcal.data.tables import require_indexable
from fusion_bench_featcal.data.text_formats import FLAGGED, Text, is_left_out, read_row
from fusion_bench_featcal.errors import CalibrationError


class TextRows:
    """Examples of a dataset of texts.

    Examples with weight 0 or KTO's label false are left out, unless columns are named. Values of a
    `ClassLabel` are read as class names.

    Attributes:
        name: The dataset's name in messages.
        columns: Standard name of a column -> its name in the dataset. Empty to read all columns.
        left_out: Number of examples that are left out.
    """

    def __init__(
        self,
        rows: Any,
        name: str,
        columns: Mapping[str, str] | None = None,
        *,
        reads_images: bool = False,
    ) -> None:
        """View a dataset.

        Args:
            rows: A table, or another dataset with a length and indices.
            name: The dataset's name in messages.
            columns: Standard name of a column -> its name in the dataset, to read only these.
            reads_images: Whether the model reads images.

        Raises:
            CalibrationError: If the dataset is streamed, or is not one split.
        """
        require_indexable(rows, name)
        self.name, self.columns, self._reads_images = name, dict(columns or {}), reads_images
        self._places = getattr(rows, "places", None)
        features = getattr(rows, "features", None) or {}
        for column in (c for c, f in features.items() if isinstance(f, datasets.Audio)):
            rows = rows.cast_column(column, datasets.Audio(decode=False))
        self._names = {c: f.names for c, f in features.items() if hasattr(f, "names")}
        self._rows = rows.with_format(None) if hasattr(rows, "with_format") else rows
        self._positions = self._counted_positions(features)
        self.left_out = len(rows) - len(self._positions)

    def _counted_positions(self, features: Mapping[str, object]) -> range | list[int]:
        rows: Any = self._rows
        positions = range(len(rows))
        if self.columns or not isinstance(rows, list | datasets.Dataset):
            return positions
        if isinstance(rows, datasets.Dataset):
            if "weight" not in features and features.get("label") != datasets.Value("bool"):
                return positions
            rows = rows.select_columns([name for name in FLAGGED if name in features])
        return [n for n in positions if not is_left_out(rows[n])]

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> Any:
        """Return an example's columns, with class names in place of class indices."""
        row = self._rows[self._positions[index]]
        if not self._names:
            return row
        indices = {c: row[c] for c in self._names if row[c] is not None}
        names = {c: self._names[c][i] if i >= 0 else None for c, i in indices.items()}
        return {**row, **names}

    def row_name(self, index: int) -> str:
        """Return an example's name in messages: its line in a file, or its position."""
        position = self._positions[index]
        place = f"example {position}" if self._places is None else self._places[position]
        return f"{self.name}, {place}"

    def read(self, index: int) -> Text:
        """Read an example.

        Raises:
            CalibrationError: If it cannot be read, or is no text.
        """
        name = self.row_name(index)
        try:
            row = self[index]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CalibrationError(f"{name} cannot be read ({error})") from error
        return read_row(row, name, self.columns, reads_images=self._reads_images)

    def classes(self, column: str) -> list[str] | None:
        """Return the class names of a column by index, or None if it has no `ClassLabel`."""
        return self._names.get(self.columns.get(column, column))
