"""Long table of what a run leaves, `lines.csv`: one number per line and the dimensions it is of."""

import csv
import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, write_atomic

LINES_FILE = "lines.csv"
VALUE = "value"
COLUMNS: tuple[str, ...] = ("suite", "merger", "row", "task", "block", "class", "metric", VALUE)
"""A dimension that does not apply to a number is empty."""

Line = dict[str, Any]
"""Column -> name; in the column `value` a number. Columns that do not apply may be absent."""


def write_lines(path: Path, lines: Iterable[Line], setting: str = LOG_DIR_SETTING) -> Path:
    """Write lines as CSV, whole or not at all, and return the path.

    Raises:
        ReportError: A value is not finite, or the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for line in lines:
        if not math.isfinite(line[VALUE]):
            raise ReportError(f"{path}: {line[VALUE]} is no value of {_named(line)}")
        writer.writerow(line)
    return write_atomic(path, text.getvalue(), setting)


def read_lines(path: Path) -> list[Line]:
    """Read what `write_lines` wrote.

    Raises:
        ReportError: The file cannot be read, has other columns, or a value that is no number.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ReportError(f"{path}: its first line is not {','.join(COLUMNS)}")
            return [_checked(line, f"{path}, line {reader.line_num}") for line in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise ReportError(f"cannot read {path}: {error}") from error


def where(lines: Iterable[Line], **dimensions: str) -> list[Line]:
    """Select the lines with some names, such as `row="featcal", class_=""`."""
    names = {column.rstrip("_"): name for column, name in dimensions.items()}
    return [line for line in lines if all(line.get(c, "") == n for c, n in names.items())]


def means(lines: Iterable[Line], *columns: str) -> dict[tuple[str, ...], float]:
    """Return the mean value of the lines with equal names in some columns, by these names."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for line in lines:
        groups.setdefault(tuple(line.get(column, "") for column in columns), []).append(line[VALUE])
    return {names: math.fsum(values) / len(values) for names, values in groups.items()}


def _checked(line: dict[str, Any], label: str) -> Line:
    if set(line) != set(COLUMNS) or None in line.values():
        raise ReportError(f"{label}: expected the columns of {LINES_FILE}")
    try:
        value = float(line[VALUE])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ReportError(f"{label}: {line[VALUE]!r} is no number")
    return {**line, VALUE: value}


def _named(line: Line) -> str:
    return ", ".join(f"{column} {line[column]}" for column in COLUMNS[2:-1] if line.get(column))
