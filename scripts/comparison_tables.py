"""Tables of README and docs about `examples/compare_full.sh`: methods by merger."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusion_bench_featcal.results.items import half_of
from fusion_bench_featcal.results.tables import Grid

REFERENCES = ("base", "experts")
Row = dict[str, Any]
REMOVED = ("svc:any", "larv", "magic")
"""Rows of the stored reports whose methods have been removed."""


def comparison_rows(folder: Path) -> list[Row]:
    """The rows of a comparison's `report.json` whose methods still exist."""
    rows = json.loads((folder / "report.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["name"] not in REMOVED]


def latest_rows(folder: Path) -> list[Row]:
    """The same with the accuracies of later runs on the same draws, in the folder `anew` beside it.

    Seconds of different runs do not compare: tables of costs have the rows of one.
    """
    later = folder.parent / "anew" / folder.name
    anew = comparison_rows(later) if later.exists() else []
    new = {named(row): row for row in anew if row["name"].startswith("featcal")}
    return [new.get(named(row), row) for row in comparison_rows(folder)]


def named(row: Row) -> tuple[str, str]:
    """Method and upstream merger of a row."""
    return row["name"], row["upstream"]


def grid_table(folder: Path) -> str:
    """Average accuracy of every method on every merger, and what it needs when deployed."""
    rows = latest_rows(folder)
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


def columns_table(folders: Mapping[str, Path], shown: Sequence[str] | None = None) -> str:
    """Average over draws with half of its interval, and the worst task's gap, by comparison.

    Args:
        folders: Head of a column -> its comparison, of one upstream merger.
        shown: Rows in this order; None: all but the base.
    """
    columns: dict[str, dict[str, Row]] = {}
    for title, folder in folders.items():
        rows = [row for row in latest_rows(folder) if row["name"] != "base"]
        methods = [row["upstream"] for row in rows if row["name"].startswith("featcal")]
        columns[title] = {_named(row, methods[0]): row for row in rows}
    every = dict.fromkeys(name for column in columns.values() for name in column)
    names = shown or sorted(every, key=lambda name: name == "experts")
    best = {
        title: max(_percent(row) for name, row in column.items() if name != "experts")
        for title, column in columns.items()
    }
    table = [
        (
            name,
            [
                _with_worst(column[name], best[title]) if name in column else "-"
                for title, column in columns.items()
            ]
            + [_task_id(column[name] for column in columns.values() if name in column)],
        )
        for name in names
    ]
    return Grid("mean over draws, % (worst gap)", [*columns, "task id"], table).markdown()


def costs_table(folder: Path) -> str:
    """Costs of every row."""
    heads = ["average", "seconds", "with merger", "memory, MiB", "ms / sample"]
    table = []
    for row in comparison_rows(folder):
        cost = row["cost"]
        values = [
            f"{_percent(row):.1f}",
            _number(cost.get("seconds"), "{:.1f}"),
            _number(cost.get("seconds_with_merger"), "{:.1f}"),
            _number(cost.get("peak_rss_bytes"), "{:.0f}", 2**20),
            _number(cost.get("inference_seconds_per_sample"), "{:.3f}", 1e-3),
        ]
        method = row["name"] if row["upstream"] in (None, row["name"]) else _head(_method(row))
        table.append((row["name"] if row["name"] in REFERENCES else method, values))
    return Grid("", heads, table).markdown()


def seconds_table(folders: Mapping[str, Path], pairs: Sequence[tuple[str, str]]) -> str:
    """Table of ratios of two rows' seconds, by comparison, with both seconds.

    Args:
        folders: Head of a line -> its comparison; of several mergers task arithmetic is shown.
        pairs: The rows that are compared: post-merging methods or mergers by themselves.
    """
    table = []
    for title, folder in folders.items():
        seconds = {
            row["name"]: row["cost"].get("seconds")
            for row in comparison_rows(folder)
            if row["upstream"] in ("task_arithmetic", row["name"])
        }
        taken = [(seconds.get(row), seconds.get(other)) for row, other in pairs]
        cells = [f"{s / o:.1f} ({s:.1f} / {o:.1f})" if s and o else "-" for s, o in taken]
        table.append((title, cells))
    return Grid("times the seconds", [f"{row} / {other}" for row, other in pairs], table).markdown()


def _number(value: Any, form: str, unit: float = 1) -> str:
    return form.format(value / unit) if isinstance(value, int | float) else "-"


def _named(row: Row, merger: str) -> str:
    if row["name"] == "experts":
        return "experts"
    return _head(_method(row)) if row["upstream"] == merger else row["name"]


def _with_worst(row: Row, best: float) -> str:
    gap = row["worst_recovered_gap"]
    return _cell(row, best) + ("" if gap is None else f" ({100 * gap:.0f} %)")


def _task_id(rows: Iterable[Row]) -> str:
    return str(next(iter(rows))["cost"].get("task_id_at_inference", "yes"))


def tasks_table(folder: Path, merger: str) -> str:
    """Accuracy of every task: mergers by themselves, and every method on one upstream merger."""
    rows = latest_rows(folder)
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
        text += f" ± {100 * half_of(row['deviation']['average'], row['runs']):.1f}"
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
