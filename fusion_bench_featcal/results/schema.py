"""Checks of report files on reading. Each names the error and its location."""

from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args

from fusion_bench_featcal.files import ReportError

from .long_table import AVERAGE
from .measures import mean

SCHEMA = 2
KIND = "run"
COMPARISON_KIND = "comparison"
# Accuracies are rounded to float32 on their way into a report.
TOLERANCE = 1e-5

# A layout is a type or a union of types, a list with the layout of all entries (empty for any
# list), or a mapping from keys, `*` for all, to layouts. Keys may be absent, except for keys listed
# under `!`. Other keys may have any value. If `?` is true the mapping may be null.
NUMBER = int | float
_SCALAR = str | int | float | bool | None
NOTE = {"!": ("kind", "text"), **dict.fromkeys(("kind", "text", "row", "task", "merger"), str)}
_ROWS = {"*": {"*": NUMBER}}
RUN = {
    "suite": str,
    "upstream": str | None,
    "rows": _ROWS,
    "loss": _ROWS,
    "settings": {"*": {}},
    "cost": {"*": {"*": _SCALAR}},
    "samples": {"*": {"*": {"!": ("samples", "split"), "samples": NUMBER, "split": str}}},
    "seeds": {"*": int | None},
    "labels": {"*": _SCALAR},
    "test_sets": {"*": {}},
    "versions": {"*": str},
    "device": {},
    "notes": [NOTE],
}
_COMPARISON_ROW = {
    "!": ("upstream", "name", "accuracy", "gain", "gain_interval", "cost"),
    "upstream": str | None,
    "name": str,
    "accuracy": {"!": (AVERAGE,), "*": NUMBER},
    "gain": NUMBER | None,
    "gain_interval": {"?": True, "!": ("low", "high"), "low": NUMBER, "high": NUMBER},
    "cost": {"*": _SCALAR},
}
_FAILED_CELL = {
    "!": ("upstream", "name", "reason"),
    "upstream": str | None,
    "name": str,
    "reason": str,
    "seed": int | None,
}
COMPARISON = {
    "!": ("suite", "rows", "failed"),
    "suite": str,
    "runs": [str],
    "failed": [_FAILED_CELL],
    "rows": [_COMPARISON_ROW],
}
_OPTIONAL = {"loss", "labels"}  # earlier reports lack them
_DERIVED = {"kind", "schema", "tasks", "recovered_gap", "recovered_gap_per_task"}


def check_types(value: Any, layout: Any, label: str) -> None:
    """Check a value read from JSON against a layout."""
    if isinstance(layout, dict):
        if value is None and layout.get("?"):
            return
        if not isinstance(value, dict):
            raise _wrong(value, "a mapping", label)
        for key in layout.get("!", ()):
            if key not in value:
                raise ReportError(f"{label}: no {key}")
        for key, entry in value.items():
            expected = layout.get("*", layout.get(key))
            if expected is not None:
                check_types(entry, expected, f"{label}: {key}")
    elif isinstance(layout, list):
        if not isinstance(value, list):
            raise _wrong(value, "a list", label)
        for number, entry in enumerate(value if layout else ()):
            check_types(entry, layout[0], f"{label}[{number}]")
    else:
        types = get_args(layout) or (layout,)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            names = ("null" if kind is NoneType else kind.__name__ for kind in types)
            raise _wrong(value, " or ".join(names), label)


def _wrong(value: Any, expected: str, label: str) -> ReportError:
    return ReportError(
        f"{label} must be {expected}, got {type(value).__name__} {str(value)[:40]!r}"
    )


def _check_kind(content: Any, kind: str, label: str) -> None:
    """Check that a report file is of a kind and of this version's schema."""
    if not isinstance(content, dict) or content.get("kind") != kind:
        name = "the report of a run" if kind == KIND else f"a {kind}"
        raise ReportError(f'{label} is not {name} (no "kind": "{kind}")')
    if content.get("schema") != SCHEMA:
        raise ReportError(
            f"{label} has schema {content.get('schema')!r}; this version of fusion_bench_featcal "
            f"reads schema {SCHEMA}. Use the version that wrote it, or run again."
        )


def check_comparison(content: Any, label: str) -> None:
    """Check the parts of a comparison's `report.json` that this package reads."""
    _check_kind(content, COMPARISON_KIND, label)
    check_types(content, COMPARISON, label)


def check_run(content: Any, label: str) -> None:
    """Check the content of a run's `report.json`.

    Raises:
        ReportError: If it is not a run's report or has another schema, a key is missing, unknown
            or of another type, or a row contradicts its average or the rows before it.
    """
    _check_kind(content, KIND, label)
    missing = sorted(set(RUN) - _OPTIONAL - set(content))
    unknown = sorted(set(content) - set(RUN) - _DERIVED)
    if missing or unknown:
        raise ReportError(f"{label}: missing keys {missing}, unknown keys {unknown}")
    check_types(content, RUN, label)
    tasks: list[str] = []
    for name, row in content["rows"].items():
        if AVERAGE not in row:
            raise ReportError(f"{label}: row '{name}' has no '{AVERAGE}'")
        values = {task: value for task, value in row.items() if task != AVERAGE}
        check_row(name, values, tasks, label)
        tasks = tasks or list(values)
        if abs(mean(values) - row[AVERAGE]) > TOLERANCE:
            raise ReportError(
                f"{label}: row '{name}': {AVERAGE} {row[AVERAGE]} is not the mean over its tasks"
            )
    for name, row in content.get("loss", {}).items():
        if not set(row) <= set(content["rows"].get(name, ())):
            raise ReportError(f"{label}: the loss of '{name}' must map the row's task names")


def check_row(name: str, row: Mapping[str, float], tasks: list[str], label: str) -> None:
    """Check one row's accuracies, without its average, against the tasks of the rows before it.

    Raises:
        ReportError: If it has no task or other tasks, or an accuracy is outside 0..1.
    """
    if not row:
        raise ReportError(f"{label}: row '{name}' has no task")
    if tasks and set(row) != set(tasks):
        missing, extra = sorted(set(tasks) - set(row)), sorted(set(row) - set(tasks))
        raise ReportError(
            f"{label}: row '{name}' is not about the same tasks as the rows before: "
            f"missing {missing}, extra {extra}"
        )
    for task, value in row.items():
        if not 0 <= value <= 1:
            raise ReportError(
                f"{label}: row '{name}', task '{task}': accuracy {value} is not in 0..1"
            )
