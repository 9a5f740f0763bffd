"""Tables of studies that change calibration data: `corruption` and `transfer`."""

from collections.abc import Mapping, Sequence
from typing import Any

from .long_table import AVERAGE, BASE, EXPERTS
from .study import Study, label_text
from .tables import ABSENT, Grid

CORRUPTION, TRANSFER = "corruption", "transfer"
CLEAN, SEVERITY, SOURCE = "clean", "severity", "source"
_AXES = {
    CORRUPTION: (CORRUPTION, SEVERITY), SEVERITY: (CORRUPTION, SEVERITY), TRANSFER: (SOURCE,),
}  # fmt: skip
_SHOWN_SEVERITY = 3  # of the paper

Rows = Mapping[tuple[str, str], Mapping[str, Any]]
"""Rows of a point by merger and name, as `study_page.merged_points` gives them."""
Points = Sequence[tuple[Mapping[str, Any], Rows]]


def data_grids(study: Study, merger: str, points: Points) -> list[tuple[str, Grid]]:
    """Further tables, with their titles, of a study that changes calibration data."""
    names, kind = corrected(study, merger), kind_of(study)
    grids: list[tuple[str, Grid]] = []
    for others, part in parts(study, points):
        behind = f"; {label_text(others)}" if others else ""
        if kind == CORRUPTION:
            title = f"change by corrupted calibration images over {merger}{behind}"
            grids.append((title, _falls_table(part, merger, names, others)))
        elif kind == TRANSFER:
            title = f"over {merger}: gain of {{}} by task, points{behind}"
            grids += [(title.format(n), _gains_table(part, merger, n, others)) for n in names]
    return [(title, grid) for title, grid in grids if grid.columns]


def kind_of(study: Study) -> str | None:
    """`corruption`, `severity` or `transfer`; None for a study without such tables and figures."""
    axes = _AXES.get(study.name)
    return study.name if axes and set(axes) <= set(study.labels) else None


def parts(study: Study, points: Points) -> list[tuple[dict[str, Any], Points]]:
    """Points by the labels that are not the study's own, which have a table or figure each."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for labels, rows in points:
        others = {k: v for k, v in labels.items() if k not in _AXES.get(study.name, ())}
        found.setdefault(tuple(others.items()), []).append((labels, rows))
    return [(dict(others), part) for others, part in found.items()]


def corrected(study: Study, merger: str) -> list[str]:
    """Names of a merger's rows that a post-merging method has made."""
    return [name for name in study.names(merger) if name not in (BASE, EXPERTS, merger)]


def by_corruption(points: Points) -> dict[str, dict[int, Rows]]:
    """Corruption -> severity -> rows; clean comes first, with the severity 0."""
    found: dict[str, dict[int, Rows]] = {CLEAN: {0: {}}}
    for labels, rows in points:
        found.setdefault(str(labels[CORRUPTION]), {})[int(labels[SEVERITY])] = rows
    return found


def shown(severities: Mapping[int, Rows]) -> tuple[int, Rows]:
    """The paper's severity where it was run, or else the strongest, with its rows."""
    severity = _SHOWN_SEVERITY if _SHOWN_SEVERITY in severities else max(severities)
    return severity, severities[severity]


def gains(points: Points, merger: str, name: str) -> dict[str, dict[str, float]]:
    """Source -> task -> gain over the merged model in points; the last is the average's."""
    found: dict[str, dict[str, float]] = {}
    for labels, rows in points:
        if (merger, name) in rows and (merger, merger) in rows:
            after, before = (rows[merger, each]["accuracy"] for each in (name, merger))
            tasks = [task for task in after if task != AVERAGE and task in before]
            found[str(labels[SOURCE])] = {
                task: 100 * (after[task] - before[task]) for task in [*tasks, AVERAGE]
            }
    return found


def _falls_table(
    points: Points, merger: str, names: Sequence[str], others: Mapping[str, Any]
) -> Grid:
    """Change of every row from clean to corrupted images."""
    every = by_corruption(points)
    clean = every.pop(CLEAN)[0]
    columns = {kind: shown(severities) for kind, severities in every.items()}
    lines = []
    for name in names:
        cells = [
            _difference(rows.get((merger, name)), clean.get((merger, name)))
            for _, rows in columns.values()
        ]
        lines.append((f"+ {name}", cells))
    heads = [f"{kind.replace('_', ' ')} {severity}" for kind, (severity, _) in columns.items()]
    return Grid(_corner("change from clean, points", others), heads, lines)


def _corner(text: str, others: Mapping[str, Any]) -> str:
    return f"{text}; {label_text(others)}" if others else text


def _difference(row: Mapping[str, Any] | None, clean: Mapping[str, Any] | None) -> str:
    if row is None or clean is None:
        return ABSENT
    return f"{100 * (row['accuracy'][AVERAGE] - clean['accuracy'][AVERAGE]):+z.1f}"


def _gains_table(points: Points, merger: str, name: str, others: Mapping[str, Any]) -> Grid:
    table = gains(points, merger, name)
    tasks = tasks_of([*table.values()])
    lines = [
        (source, [f"{line[t]:+z.1f}" if t in line else ABSENT for t in tasks])
        for source, line in table.items()
    ]
    return Grid(_corner("calibrated on", others), tasks, lines)


def tasks_of(lines: Sequence[Mapping[str, float]]) -> list[str]:
    """Tasks of all sources' gains in order; the average last."""
    tasks = dict.fromkeys(task for line in lines for task in line if task != AVERAGE)
    return [*tasks, AVERAGE] if lines else []
