"""Tables of README and docs about `examples/compare_full.sh`: methods by merger."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusion_bench_featcal.results.tables import Grid

REFERENCES = ("base", "experts")
Row = dict[str, Any]


def comparison_rows(folder: Path) -> list[Row]:
    """The rows of a comparison's `report.json`."""
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))["rows"]


def grid_table(folder: Path) -> str:
    """Average accuracy of every method on every merger, and what it needs when deployed."""
    rows = comparison_rows(folder)
    paired = _paired(rows)
    mergers = list(dict.fromkeys(row["upstream"] for row in paired))
    lines = {_head(name): _by_merger(paired, name) for name in _methods(paired)}
    table = []
    best = {merger: max(_percent(line[merger]) for line in lines.values()) for merger in mergers}
    for head, line in lines.items():
        cells = [_cell(line[merger], best[merger]) for merger in mergers]
        table.append((head, [*cells, *_deployed(next(iter(line.values())), head)]))
    columns = [*mergers, "task id", "parameters added", "samples"]
    return "\n".join([Grid("average, %", columns, table).markdown(), "", *_beside(rows, paired)])


def seeds_table(folders: Sequence[Path]) -> str:
    """Mean and deviation over seeds of every method, by merger and number of samples."""
    columns: dict[str, dict[str, Row]] = {}
    for folder in folders:
        paired = _paired(comparison_rows(folder))
        for merger in dict.fromkeys(row["upstream"] for row in paired):
            title = f"{merger}, {folder.name.replace('n', 'n = ', 1)}"
            columns[title] = {_method(row): row for row in paired if row["upstream"] == merger}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    table = []
    best = {title: max(map(_percent, column.values())) for title, column in columns.items()}
    for name in names:
        cells = [_cell(column[name], best[title]) for title, column in columns.items()]
        table.append((_head(name), cells))
    return Grid("average, %", list(columns), table).markdown()


def tasks_table(folder: Path, merger: str) -> str:
    """Accuracy of every task: mergers by themselves, and every method on one upstream merger."""
    rows = comparison_rows(folder)
    repaired = {row["upstream"] for row in _paired(rows)} - {merger}
    shown = [row for row in rows if row["upstream"] not in repaired or row["name"] in REFERENCES]
    heads = list(rows[0]["accuracy"])
    table = []
    for row in shown:
        head = row["name"] if row["name"] == row["upstream"] else _head(row["name"])
        head = row["name"] if row["name"] in REFERENCES else head
        table.append((head, [f"{100 * row['accuracy'][task]:.1f}" for task in heads]))
    return Grid("accuracy, %", heads, table).markdown()


def _paired(rows: Sequence[Row]) -> list[Row]:
    """Rows of mergers that something was run on, and of what was run on them."""
    repaired = {row["upstream"] for row in rows if _method(row) not in ("", *REFERENCES)}
    return [row for row in rows if row["upstream"] in repaired and row["name"] not in REFERENCES]


def _method(row: Row) -> str:
    """The post-merging method; "" for the merger itself."""
    return "" if row["name"] == row["upstream"] else row["name"]


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(map(_method, rows)))


def _by_merger(rows: Sequence[Row], method: str) -> dict[str, Row]:
    return {row["upstream"]: row for row in rows if _method(row) == method}


def _head(method: str) -> str:
    return f"+ {method}" if method else "merged"


def _percent(row: Row) -> float:
    return round(100 * row["accuracy"]["average"], 1)


def _cell(row: Row, best: float) -> str:
    value = _percent(row)
    text = f"{value:.1f}"
    if row["deviation"]:
        text += f" ± {100 * row['deviation']['average']:.1f}"
    return f"**{text}**" if value == best else text


def _deployed(row: Row, name: str) -> list[str]:
    cost = row["cost"]
    return [
        str(cost.get("task_id_at_inference", "no")),
        f"{cost.get('parameters_added', 0):.0f}",
        row["samples"] if name != "merged" else "",
    ]


def _beside(rows: Sequence[Row], paired: Sequence[Row]) -> list[str]:
    """References, and mergers that nothing was run on."""
    known = {row["name"] for row in paired}
    others = [row for row in rows if row["name"] not in known]
    texts = [f"{row['name']} {_percent(row):.1f}" for row in others]
    return [f"- beside them: {', '.join(texts)}"] if texts else []
