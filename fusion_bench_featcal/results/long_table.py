"""The long table of results, `lines.csv`: one number per line with its dimensions."""

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, write_atomic

BASE = "base"
EXPERTS = "experts"
FEATCAL = "featcal"
AVERAGE = "average"
UNAVAILABLE = "unavailable"
COMPARISON_SEED = "comparison"
"""Key of a comparison's seed in the seeds of a run."""
GIVEN = "merged"
"""Row of a merged model with an unknown merger."""
LEAST_GAP = 0.01
"""Smallest merged-to-expert gap of a task for computing a share: one point."""

ACCURACY, LOSS, NORMALISED, GAIN, SHARE, COST = (
    "accuracy", "loss", "normalised", "gain", "recovered_gap", "cost.",
)  # fmt: skip
"""Metrics of every run. Measured costs begin with `cost.`."""

LINES_FILE = "lines.csv"
VALUE = "value"
DIMENSIONS = ("suite", "merger", "row", "task", "block", "class", "seed", "metric")
"""Columns of every table in addition to `value`. A dimension that does not apply is empty."""

Line = dict[str, Any]
"""Dimension -> name, and `value` -> number. Settings that differ between runs are
further dimensions."""
Row = Mapping[str, float]
"""Task (and `average`) -> accuracy."""
RowKey = tuple[str, str | None, str]
"""Suite, merger and row."""


def file_suffix(row: str) -> str:
    """Return the ending of a FeatCal row's file names: `.plus` for `featcal_plus`."""
    return row.removeprefix(FEATCAL).replace("_", ".", 1)


def merged_by(merger: str | None) -> str:
    """Return a phrase with the upstream merger, for titles."""
    return "merged elsewhere" if merger == GIVEN else f"merged by {merger or 'nobody'}"


def is_repair(row: str, merger: str | None) -> bool:
    """Return whether a row was made from a merged model, unlike base, experts and the merger."""
    return row not in (BASE, EXPERTS, merger)


def write_lines(path: Path, lines: Iterable[Line], setting: str = LOG_DIR_SETTING) -> Path:
    """Write lines as CSV, atomically, and return the path.

    Args:
        path: The file.
        lines: The lines. Labels become the first columns.
        setting: The setting that chose the folder, for messages.

    Raises:
        ReportError: If a value is not finite, or the file cannot be written.
    """
    lines = list(lines)
    labels = [key for key in dict.fromkeys(key for line in lines for key in line)
              if key not in (*DIMENSIONS, VALUE)]  # fmt: skip
    text = io.StringIO()
    writer = csv.DictWriter(text, [*labels, *DIMENSIONS, VALUE], lineterminator="\n")
    writer.writeheader()
    for line in lines:
        if not math.isfinite(line[VALUE]):
            names = ", ".join(f"{key} {line[key]}" for key in DIMENSIONS[2:] if line.get(key))
            raise ReportError(f"{path}: {line[VALUE]} is no value of {names}")
        writer.writerow(line)
    return write_atomic(path, text.getvalue(), setting)


def read_lines(path: Path) -> list[Line]:
    """Read a file of `write_lines`. Seeds and labels that look like numbers become numbers.

    Raises:
        ReportError: If the file cannot be read, lacks a column, or has a value that is no number.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            heads = reader.fieldnames or ()
            if missing := [name for name in (*DIMENSIONS, VALUE) if name not in heads]:
                raise ReportError(f"{path}: its first line has no {', '.join(missing)}")
            return [_checked(line, f"{path}, line {reader.line_num}") for line in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise ReportError(f"cannot read {path}: {error}") from error


def where(lines: Iterable[Line], **dimensions: Any) -> list[Line]:
    """Select lines by dimensions, such as `row="featcal", class_=""`."""
    names = {column.rstrip("_"): name for column, name in dimensions.items()}
    return [line for line in lines if all(line.get(c, "") == n for c, n in names.items())]


def means(lines: Iterable[Line], *columns: str) -> dict[tuple[Any, ...], float]:
    """Return the mean value of lines with equal names in some columns, by these names.

    Raises:
        ReportError: If lines of one mean have several suites or metrics, or mix a total with its
            parts: blocks, classes, or tasks with their average.
    """
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line.get(column, "") for column in columns), []).append(line)
    for names, group in groups.items():
        label = f"the mean of {', '.join(map(str, names))}".rstrip(" of")
        for column in ("suite", "metric"):
            if len(several := {line.get(column, "") for line in group}) > 1:
                raise ReportError(f"{label} would mix the {column}s {', '.join(sorted(several))}")
        for column in ("task", "block", "class"):
            if len({line.get(column, "") in ("", AVERAGE) for line in group}) > 1:
                raise ReportError(f"{label} would mix a {column} with what it is part of")
    return {
        names: math.fsum(line[VALUE] for line in group) / len(group)
        for names, group in groups.items()
    }


def _checked(line: dict[str, Any], label: str) -> Line:
    if None in line or None in line.values():
        raise ReportError(f"{label}: its columns are not those of the first line")
    value = _number(line[VALUE])
    if isinstance(value, str) or not math.isfinite(value):
        raise ReportError(f"{label}: {line[VALUE]!r} is no number")
    named = {key: text if key in _NAMES else _number(text) for key, text in line.items()}
    return named | {VALUE: value}


_NAMES = {*DIMENSIONS} - {"seed"}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
