"""Columns of texts: the usual formats of rows, and columns of other names."""

from collections.abc import Mapping, Sequence
from typing import Any

import datasets

from fusion_bench_featcal.calibration_text import text_rows
from fusion_bench_featcal.data.loading import naming_setting
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.nearest_names import nearest_hint, refuse_unknown_keys


def open_texts(
    location: str,
    split: str,
    place: str,
    *,
    columns: Mapping[str, str],
    names: Sequence[str],
    usual: Sequence[str] = (),
) -> Any:
    """Open a table of texts whose columns may have names of their own.

    Args:
        location: A table, a saved data set or a hub data set, as `load_texts` takes them.
        split: The split where there are several.
        place: The option that names it, for messages.
        columns: Name of a column here -> its name in the table. Columns that are not among them
            are not read, but those of `names` that have these names already.
        names: Names that columns may have here.
        usual: Names of columns of which one is needed where `columns` is empty; none: of `names`.

    Raises:
        ValueError: If there is no such column, or none of the usual ones.
        CalibrationError: If the data cannot be read.
    """
    with naming_setting(place):
        table = load_texts(location, split)
    rows = text_rows(table, place)
    refuse_unknown_keys(columns, names, f"{place}: --columns")
    there = list(rows.column_names)
    for column in columns.values():
        if column not in there:
            raise ValueError(
                f"{place} has no column {column!r}{nearest_hint(column, there)}; it has "
                f"{', '.join(there)}"
            )
    if not columns:
        if not {*there} & {*(usual or names)}:
            raise ValueError(_unusual(rows, place, names))
        return rows
    kept = {} if usual else {name: name for name in names if name in there}
    chosen = kept | dict(columns)
    return rows.select_columns(list(chosen.values())).rename_columns(
        {column: name for name, column in chosen.items()}
    )


def _unusual(rows: datasets.Dataset, place: str, names: Sequence[str]) -> str:
    """Return a sentence on columns of unknown meaning, with the option that tells it."""
    texts = [
        name
        for name, feature in rows.features.items()
        if getattr(feature, "dtype", None) in ("string", "large_string")
    ]
    pairs = zip(names, texts or ["COLUMN"], strict=False)
    words = ",".join(f"{name}={column}" for name, column in list(pairs)[:2])
    return (
        f"{place} has the columns {', '.join(rows.column_names)}, of which none is usual: say what "
        f"they hold, such as --columns {words}"
    )
