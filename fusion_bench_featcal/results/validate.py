"""Checks on the content of report files, each naming what is wrong and its place."""

from collections.abc import Mapping
from typing import Any

from fusion_bench_featcal.files import ReportError

from .long_table import AVERAGE, mean

SCHEMA = 1
KIND = "run"

# Accuracies pass through float32 on their way into a report.
TOLERANCE = 1e-5

_OPTIONAL = {"loss"}  # earlier reports lack it
_DERIVED = {"kind", "digest", "schema", "tasks", "recovered_gap", "recovered_gap_per_task"}

NUMBER = (int, float)
_SCALAR = (str, int, float, bool, None)
_ROWS = {"*": {"*": NUMBER}}

RUN = {
    "suite": (str,),
    "upstream": (str, None),
    "rows": _ROWS,
    "loss": _ROWS,
    "settings": {"*": {}},
    "cost": {"*": {"*": _SCALAR}},
    "samples": {"*": {"*": {"!": ("samples", "split"), "samples": NUMBER, "split": (str,)}}},
    "seeds": {"*": (int, None)},
    "test_sets": {"*": {}},
    "versions": {"*": (str,)},
    "device": {},
    "notes": [(str,)],
}
"""Layout of a run's report."""

_INTERVAL = ({"!": ("low", "high"), "low": NUMBER, "high": NUMBER}, None)
COMPARISON = {
    "suite": (str,),
    "runs": [(str,)],
    "failed": [{"upstream": (str, None), "name": (str,), "reason": (str,), "seed": (int, None)}],
    "rows": [
        {
            "!": ("upstream", "name", "accuracy"),
            "upstream": (str, None),
            "name": (str,),
            "accuracy": {"*": NUMBER},
            "gain": (*NUMBER, None),
            "gain_interval": _INTERVAL,
            "cost": {"*": _SCALAR},
        }
    ],
}
"""Layout of a comparison's report, as far as it is read again."""


def check_types(value: Any, layout: Any, place: str) -> None:
    """Check what was read from JSON; keys that the layout does not name may hold anything.

    Args:
        value: The value.
        layout: Types, of which it must be one (None for null); a list with the layout of all
            entries; or a mapping from keys, `*` for all, to layouts. Keys may be absent but for
            those listed under `!`.
        place: Where it stands, for the message.

    Raises:
        ReportError: Naming the first place that holds something else.
    """
    if isinstance(layout, tuple):
        _check_one_of(value, layout, place)
    elif isinstance(layout, list):
        if not isinstance(value, list):
            raise _wrong(value, "a list", place)
        for number, entry in enumerate(value):
            check_types(entry, layout[0], f"{place}[{number}]")
    else:
        if not isinstance(value, Mapping):
            raise _wrong(value, "a mapping", place)
        for key in layout.get("!", ()):
            if key not in value:
                raise ReportError(f"{place}: no {key}")
        for key, entry in value.items():
            expected = layout.get("*", layout.get(key))
            if expected is not None:
                check_types(entry, expected, f"{place}: {key}")


def _check_one_of(value: Any, kinds: tuple[Any, ...], place: str) -> None:
    nested = [kind for kind in kinds if isinstance(kind, dict)]
    if value is None and None in kinds:
        return
    if nested and isinstance(value, Mapping):
        check_types(value, nested[0], place)
        return
    types = tuple(kind for kind in kinds if isinstance(kind, type))
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = [kind.__name__ for kind in types] + (["null"] if None in kinds else [])
        raise _wrong(value, " or ".join(names or ["a mapping"]), place)


def _wrong(value: Any, expected: str, place: str) -> ReportError:
    shown = f"{type(value).__name__} {str(value)[:40]!r}"
    return ReportError(f"{place} must be {expected}, got {shown}")


def check_row(name: str, row: Mapping[str, float], tasks: list[str], place: str) -> None:
    """Check one row's accuracies, without its average, against the tasks of the rows before it.

    Raises:
        ReportError: No task, other tasks, or an accuracy outside 0..1.
    """
    if not row:
        raise ReportError(f"{place}: row '{name}' has no task")
    if tasks and set(row) != set(tasks):
        missing = sorted(set(tasks) - set(row))
        extra = sorted(set(row) - set(tasks))
        raise ReportError(
            f"{place}: row '{name}' is not about the same tasks as the rows before: "
            f"missing {missing}, extra {extra}"
        )
    for task, value in row.items():
        if not 0 <= value <= 1:
            raise ReportError(
                f"{place}: row '{name}', task '{task}': accuracy {value} is not in 0..1"
            )


def check_content(content: Any, place: str) -> None:
    """Check what was read from a `report.json`.

    Raises:
        ReportError: Not a run's report, another schema, a key missing, unknown or of another type,
            a row that contradicts its average or the rows before it.
    """
    _check_layout(content, place)
    tasks: list[str] = []
    for name, row in content["rows"].items():
        if not isinstance(row, dict) or not all(_is_number(value) for value in row.values()):
            raise ReportError(f"{place}: row '{name}' must map task names to numbers")
        if AVERAGE not in row:
            raise ReportError(f"{place}: row '{name}' has no '{AVERAGE}'")
        values = {task: value for task, value in row.items() if task != AVERAGE}
        check_row(name, values, tasks, place)
        tasks = tasks or list(values)
        if abs(mean(values) - row[AVERAGE]) > TOLERANCE:
            raise ReportError(
                f"{place}: row '{name}': {AVERAGE} {row[AVERAGE]} is not the mean over its tasks"
            )
    _check_loss(content.get("loss", {}), content["rows"], place)
    check_types(content, RUN, place)


def _check_loss(loss: Mapping[str, Any], rows: Mapping[str, Any], place: str) -> None:
    for name, row in loss.items():
        known = isinstance(row, dict) and set(row) <= set(rows.get(name, ()))
        if not known or not all(_is_number(value) for value in row.values()):
            raise ReportError(
                f"{place}: the loss of '{name}' must map the row's task names to numbers"
            )


def _check_layout(content: Any, place: str) -> None:
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ReportError(f'{place} is not the report of a run (no "kind": "{KIND}")')
    if content.get("schema") != SCHEMA:
        raise ReportError(
            f"{place} has schema {content.get('schema')!r}; this version of fusion_bench_featcal "
            f"reads schema {SCHEMA}. Use the version that wrote it, or run again."
        )
    missing = sorted(set(RUN) - _OPTIONAL - set(content))
    unknown = sorted(set(content) - set(RUN) - _DERIVED)
    if missing or unknown:
        raise ReportError(f"{place}: missing keys {missing}, unknown keys {unknown}")
    for key, layout in RUN.items():
        kinds = layout if isinstance(layout, tuple) else (type(layout),)
        types = tuple(type(None) if kind is None else kind for kind in kinds)
        if key in content and not isinstance(content[key], types):
            raise ReportError(f"{place}: '{key}' has the wrong type {type(content[key]).__name__}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
