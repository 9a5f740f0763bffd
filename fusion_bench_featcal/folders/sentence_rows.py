"""Tables of texts for models of sentence-transformers, with the library's own columns."""

from collections.abc import Mapping
from typing import Any

from fusion_bench_featcal.data.labels import LABEL
from fusion_bench_featcal.data.loading import unloadable
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.encoders.texts import TARGET_COLUMNS, TEXT_NAMES, text_names
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.folders.request import Request


class SentenceRows:
    """A table whose rows are the dictionaries that the library's trainers read.

    Attributes:
        columns: Name of a text -> its column. Names are those of the library, such as `query`.
        unread: Columns that are not read.
    """

    def __init__(self, rows: TextRows, available: list[str], columns: Mapping[str, str]) -> None:
        """Choose columns: those that are named, or all with known names.

        Args:
            rows: The table.
            available: Its columns.
            columns: Name -> column, of which `label` is a target.
        """
        self._rows = rows
        chosen_names = text_names(columns)
        self.columns = {name: columns[name] for name in chosen_names}
        self.columns = self.columns or {name: name for name in text_names(available)}
        targets = {name: columns.get(name, name) for name in TARGET_COLUMNS}
        self._targets = {n: c for n, c in targets.items() if n in columns or c in available}
        read = {*self.columns.values(), *self._targets.values()}
        self.unread = [column for column in available if column not in read]
        first = {column: _as_number(rows[0].get(column)) for column in self.unread}
        texts = [c for c, value in first.items() if not isinstance(value, int | float)]
        self._others = {} if chosen_names else {c: rows[0].get(c) for c in texts}

    @property
    def problem(self) -> str | None:
        """Return why it is not known which columns are texts, or None if it is known."""
        if not self.columns:
            return ", and none of them is a known name of a text"
        texts = ", ".join(self.columns)
        pair_columns = [name for name in self.columns if not name.startswith("negative")]
        if len(pair_columns) != min(2, len(self.columns)):
            return (
                f", of which {texts} are texts, but an example has one text, or two and negatives"
            )
        name, *more = self.columns
        if self._others and not more and name not in ("text", "sentence"):
            return f", of which only {texts} is a known name of a text"
        lists = [c for c, v in self._others.items() if "neg" in c.lower() and isinstance(v, list)]
        if not lists:
            return None
        advice = "Write a column for each text (negative_1, negative_2, ...), or leave it out"
        return f", and column {lists[0]} has lists, which are not read. {advice}"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an example's texts and targets. Texts of numbers (in CSV files) become numbers."""
        row = self._rows[index]
        chosen = {name: row.get(column) for name, column in self.columns.items()}
        for name, text in chosen.items():
            if not isinstance(text, str) or not text.strip():
                column = self.columns[name]
                advice = ": write an example for each of its texts" * isinstance(text, list)
                raise ValueError(
                    f"{self.row_name(index)}: {column} is {text!r:.40}, not a text{advice}"
                )
        targets = {name: row.get(column) for name, column in self._targets.items()}
        return chosen | {name: _as_number(value) for name, value in targets.items()}

    def texts(self, index: int) -> tuple[str, ...]:
        """Return an example's texts, without its targets."""
        row = self[index]
        return tuple(row[name] for name in self.columns)

    def row_name(self, index: int) -> str:
        """Return the name of an example in messages."""
        return self._rows.row_name(index)


def _as_number(value: object) -> Any:
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
    with error_context(option, cause=unloadable):
        table = load_texts(location, split)
        rows = TextRows(table, option)
    available = [*table.column_names]
    if not len(rows):
        raise ValueError(f"{option} has no examples")
    refuse_unknown(columns, [*text_names(columns), *TEXT_NAMES, *TARGET_COLUMNS], "--columns ")
    absent = [f"{name}={column}" for name, column in columns.items() if column not in available]
    absent = [pair for pair in absent if not pair.startswith(f"{LABEL}=")]  # only scores need it
    opened = SentenceRows(rows, available, columns)
    if reason := f", so {', '.join(absent)} is wrong" if absent else opened.problem:
        raise ValueError(
            f"{option} has the columns {', '.join(available)}{reason}: name them with --columns "
            "[NAME:]text=COLUMN, or query=COLUMN,document=COLUMN"
        )
    return opened
