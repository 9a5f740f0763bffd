"""Rows of texts for models of sentence-transformers, with the library's own columns."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fusion_bench_featcal.data.labels import LABEL
from fusion_bench_featcal.data.loading import naming_setting
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.encoders.texts import TARGET_COLUMNS, in_order, is_id
from fusion_bench_featcal.folders.request import Request

_SEEN = 1000
"""Number of rows whose values tell columns of texts."""


class SentenceRows:
    """A table, of which a row is the dictionary that the library's trainers would read.

    Attributes:
        columns: Name of a text -> its column. Names are those of the library, such as `query`.
        unread: Columns that are not read.
    """

    def __init__(self, rows: TextRows, available: list[str], columns: Mapping[str, str]) -> None:
        """Choose columns: those that are named, `text` with `text_pair`, or all with texts.

        Args:
            rows: The table.
            available: Its columns.
            columns: Name -> column, of which `label` is a target.
        """
        self._rows = rows
        texts = {name: column for name, column in columns.items() if name not in TARGET_COLUMNS}
        if not texts and "text" in available:
            texts = {name: name for name in ("text", "text_pair") if name in available}
        if not texts:
            usable = [c for c in available if c not in TARGET_COLUMNS and not is_id(c)]
            first = [rows[number] for number in range(min(len(rows), _SEEN))]
            texts = {c: c for c in usable if any(isinstance(row.get(c), str) for row in first)}
        self._targets = {name: name for name in TARGET_COLUMNS if name in available}
        self._targets |= {
            name: column for name, column in columns.items() if name in TARGET_COLUMNS
        }
        self.columns = {name: texts[name] for name in in_order(texts)}
        self._numbers = {c for c in available if isinstance(_number(rows[0].get(c)), float)}
        self.unread = [c for c in available if c not in {**texts, **self._targets}.values()]

    @property
    def hint(self) -> str:
        """Return how to name the score of a pair, if a column of numbers is not read."""
        numbers = [column for column in self.unread if column in self._numbers]
        if len(self.columns) != 2 or self._targets or not numbers:
            return ""
        return f". If {numbers[0]} is the score of the pair: --columns score=COLUMN"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a row's texts and targets. Texts of numbers, which CSV files have, are numbers."""
        row = self._rows[number]
        chosen = {name: row.get(column) for name, column in self.columns.items()}
        for name, text in chosen.items():
            if not isinstance(text, str) or not text.strip():
                column = self.columns[name]
                raise ValueError(f"{self.at(number)}: {column} is {text!r:.40}, not a text")
        return chosen | {name: _number(row.get(column)) for name, column in self._targets.items()}

    def at(self, number: int) -> str:
        """Return the name of a row in messages."""
        return self._rows.at(number)


def _number(value: Any) -> Any:
    """Return the number that a text is, or the value itself."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return int(value.lower() == "true")
    try:
        return int(value) if value.strip().lstrip("-").isdecimal() else float(value)
    except ValueError:
        return value


def open_sentences(
    task: str, request: Request, location: str, split: str, option: str
) -> SentenceRows:
    """Open a task's table.

    Raises:
        ValueError: If it has no rows, or not the columns that are named, or no texts.
    """
    columns = request.columns_of(task)
    with naming_setting(option):
        table = load_texts(location, split)
        rows = TextRows(table, option)
    available = [*table.column_names]
    if not len(rows):
        raise ValueError(f"{option} has no rows")
    absent = [f"{name}={column}" for name, column in columns.items() if column not in available]
    absent = [pair for pair in absent if not pair.startswith(f"{LABEL}=")]  # only scores need it
    opened = None if absent else SentenceRows(rows, available, columns)
    if opened is None or not opened.columns:
        reason = f", so {', '.join(absent)} is wrong" if absent else ", and none of them has texts"
        raise ValueError(
            f"{option} has the columns {', '.join(available)}{reason}: name them by --columns "
            "[NAME:]text=COLUMN, or query=COLUMN,document=COLUMN"
        )
    return opened


def opener(task: str, request: Request) -> Any:
    """Return a function from location, split and option to a task's table."""
    return partial(open_sentences, task, request)
