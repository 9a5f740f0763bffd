"""Labels and scores of an encoder's test rows, and their kind."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fusion_bench_featcal.encoders.texts import TARGET_COLUMNS

Label = Callable[[int], str]
"""Returns the name of a row in messages, by its position."""


class RowTargets(NamedTuple):
    """Labels or scores of rows.

    Attributes:
        name: Their column.
        values: One for each row, or none.
        kind: `none`, `binary` (0 and 1), `scores`, `classes` (whole numbers), `words` or `lists`.
    """

    name: str
    values: Sequence[Any]
    kind: str

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], label: Label) -> "RowTargets":
        """Return the first column of targets that has values."""
        for name in TARGET_COLUMNS[:-1]:
            values = [_plain(row.get(name)) for row in rows]
            if all(value is None for value in values):
                continue
            if None in values:
                raise ValueError(
                    f"{label(values.index(None))} has no {name}, but other rows have one: give it, "
                    "leave the row out, or evaluate nothing (--no-eval)"
                )
            kind = _kind(name, values)
            return cls(name, [*map(int, values)] if kind == "binary" else values, kind)
        return cls("", [], "none")

    @property
    def are_classes(self) -> bool:
        """True if each value is a word or a whole number, as a float or not."""
        return all(value == value // 1 for value in self.values if isinstance(value, float))

    @property
    def all_belong(self) -> bool:
        """True if the texts of each row belong together."""
        return self.kind == "none" or (self.kind == "binary" and all(self.values))


def _plain(value: Any) -> Any:
    """Return a value as Python has it, and None for NaN, which tables have in empty cells."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and value != value else value


def _kind(name: str, values: Sequence[object]) -> str:
    if not all(isinstance(value, Hashable) for value in values):
        return "lists"
    if not all(isinstance(value, int | float) for value in values):
        return "words"
    if {*values} <= {0, 1}:
        return "binary"
    has_floats = any(isinstance(value, float) for value in values)
    return "scores" if has_floats or name.startswith("score") else "classes"


def too_few(targets: RowTargets) -> str:
    """Return why targets are too alike for a figure without any one row, or an empty text."""
    rows, alike = len(targets.values), max(Counter(targets.values).values())
    if rows >= 4 and rows - alike >= 2:
        return ""
    return f"too few of its {rows} rows differ in {targets.name} (more by --eval)"
