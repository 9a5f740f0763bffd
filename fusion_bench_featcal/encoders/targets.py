"""Labels and scores of an encoder's test examples, and their kind."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fusion_bench_featcal.encoders.texts import TARGET_COLUMNS

RowName = Callable[[int], str]
"""Returns the name of an example in messages, by its index."""


class Targets(NamedTuple):
    """Labels or scores of examples.

    Attributes:
        name: Their column.
        values: One for each example, or none.
        kind: `none`, `binary` (0 and 1), `scores`, `classes` (whole numbers), `words` or `lists`.
    """

    name: str
    values: Sequence[Any]
    kind: str

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], row_name: RowName) -> "Targets":
        """Return the targets of the first column that has any."""
        for name in TARGET_COLUMNS[:-1]:
            values = [_python_value(row.get(name)) for row in rows]
            if all(value is None for value in values):
                continue
            if None in values:
                raise ValueError(
                    f"{row_name(values.index(None))} has no {name}, but other examples have one: "
                    "add it, remove the example, or skip the evaluation (--no-eval)"
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
        """True if the texts of each example belong together."""
        return self.kind == "none" or (self.kind == "binary" and all(self.values))


def _python_value(value: Any) -> Any:
    """Return a value of numpy as one of Python, and None for NaN (an empty cell of a table)."""
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


def too_few(targets: Targets) -> str | None:
    """Return why a metric is undefined if one example is left out, or None if it is defined."""
    rows, alike = len(targets.values), max(Counter(targets.values).values())
    if rows >= 4 and rows - alike >= 2:
        return None
    return f"too few of its {rows} examples differ in {targets.name} (give more with --eval)"
