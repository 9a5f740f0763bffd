"""How a combined result looks: in the terminal, and as `report.{json,csv,md}`."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.files import plain, prepare_directory, sealed_json, write_atomic

from .combine import Combined, CombinedRow
from .find import refuse_run
from .items import BOOTSTRAP_SEED, LEVEL, RESAMPLES, Interval
from .names import AVERAGE, BASE, EXPERTS
from .report import REPORT_FILE
from .tables import (
    MARKDOWN_COLUMNS,
    TEXT_WIDTH,
    WORST,
    Grid,
    best_cells,
    console,
    fitting,
    loss_grid,
    markdown_grid,
    percent,
    print_lines,
    short_names,
    titled_tables,
    worst_cells,
)
from .validate import SCHEMA

if TYPE_CHECKING:
    from rich.table import Table

COMBINED_KIND = "combined"
_ABSENT = "-"


def combined_tables(
    combined: Combined, width: int = TEXT_WIDTH, *, tasks: bool = True
) -> "list[Table]":
    """Terminal tables of each suite: averages with their intervals and, if asked for, tasks."""
    tables = []
    for suite in combined.suites:
        summary = summary_grid(combined, suite).split(width)
        tables += titled_tables(f"{suite}: average over tasks", summary)
        if tasks:
            per_task = fitting(task_grid(combined, suite), width)
            tables += titled_tables(f"{suite}: accuracy per task, %", per_task)
    return tables


def show_combined(combined: Combined, *, tasks: bool = True) -> None:
    """Print the tables (those per task only if asked) and what the numbers mean to stdout."""
    terminal = console()
    for table in combined_tables(combined, terminal.width, tasks=tasks):
        terminal.print(table)
    print_lines(terminal, explanations(combined))


def write_combined(combined: Combined, directory: str | Path, setting: str = "--out") -> Path:
    """Write `report.csv`, `report.md` and, last, `report.json`; returns the last one's path.

    Raises:
        ReportError: The folder cannot be written, or is itself a run whose report would be lost.
    """
    refuse_run(directory, setting)
    text = sealed_json(combined_dict(combined))
    directory = prepare_directory(directory, setting)
    write_atomic(directory / "report.csv", combined_csv(combined), setting)
    write_atomic(directory / "report.md", combined_markdown(combined), setting)
    return write_atomic(directory / REPORT_FILE, text, setting)


def combined_dict(combined: Combined) -> dict[str, Any]:
    """Return what the combined `report.json` holds."""
    return {
        "kind": COMBINED_KIND,
        "schema": SCHEMA,
        "bootstrap": {"resamples": RESAMPLES, "level": LEVEL, "seed": BOOTSTRAP_SEED},
        **plain(asdict(combined), "combined"),
    }


def combined_csv(combined: Combined) -> str:
    """Long form, one line per suite, upstream merger, row and task; `average` has the intervals."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    measures = ("gain", "recovered_gap")
    heads = [f"{measure}{part}" for measure in measures for part in ("", "_low", "_high")]
    place = ["suite", "upstream", "name", "runs", "task"]
    writer.writerow([*place, "accuracy", "deviation", *heads, "loss"])
    for row in combined.rows:
        for task, accuracy in row.accuracy.items():
            line = [row.suite, row.upstream or "", row.name, len(row.seeds), task]
            line += [_number(accuracy), _number(row.deviation[task] if row.deviation else None)]
            if task == AVERAGE:
                line += _with_limits(row.gain, row.gain_interval)
                line += _with_limits(row.recovered_gap, row.recovered_gap_interval)
            line += [""] * (7 + len(heads) - len(line))
            writer.writerow([*line, _number(row.loss.get(task))])
    return text.getvalue()


def combined_markdown(combined: Combined) -> str:
    """Return the text of the combined `report.md`."""
    parts = ["# Combined report"]
    for suite in combined.suites:
        tasks = task_grid(combined, suite)
        parts += [
            f"## {suite}",
            markdown_grid(summary_grid(combined, suite)),
            markdown_grid(tasks if len(tasks.columns) <= MARKDOWN_COLUMNS else tasks.transposed()),
            *loss_parts(combined, suite),
        ]
    parts.append("\n".join(f"- {line}" for line in explanations(combined)))
    parts += ["## Runs", "\n".join(f"- `{run}`" for run in combined.runs)]
    return "\n\n".join(parts) + "\n"


def loss_parts(combined: Combined, suite: str) -> list[str]:
    """Heading and Markdown table of the rows' losses; nothing where there are none."""
    losses = {
        f"{row_head(row)} ({row.upstream})" if _is_repair(row) else row.name: row.loss
        for row in displayed_rows(combined, suite)
        if row.loss
    }
    tasks = next(row.tasks for row in combined.rows if row.suite == suite)
    return ["### Loss", markdown_grid(loss_grid(losses, tasks))] if losses else []


def explanations(combined: Combined) -> list[str]:
    """Sentences under the tables: what the numbers mean, then the runs' own notes."""
    lines = ["accuracy in per cent, mean over runs; ± is the standard deviation over runs"]
    if any(row.gain_interval for row in combined.rows):
        lines.append(
            f"gain over the upstream merger in points; in brackets the {100 * LEVEL:.0f} % "
            f"interval of a paired bootstrap over test items ({RESAMPLES} resamples), given the "
            "runs' seeds"
        )
    lines.append("recovered gap: (row - merged) / (experts - merged) on the average")
    if any(row.worst_task for row in combined.rows):
        lines.append(
            "worst task: the one with the smallest share recovered, of those with a gap of a point "
            "or more"
        )
    return lines + [f"note: {note}" for note in combined.notes]


def summary_grid(combined: Combined, suite: str) -> Grid:
    """Average, gain over the upstream merger and recovered gap, with their intervals."""
    rows = displayed_rows(combined, suite)
    worst = worst_texts(rows)
    lines = [
        (
            row_head(row),
            [
                str(len(row.seeds)),
                average_text(row),
                gain_text(row),
                recovered_text(row),
                *last,
                f"{row.cost['seconds']:.1f}" if "seconds" in row.cost else _ABSENT,
            ],
        )
        for row, last in zip(rows, worst, strict=True)
    ]
    heads = WORST if any(worst) else ()
    columns = ["runs", AVERAGE, "gain over merged", "recovered gap", *heads, "seconds"]
    return Grid("average, %", columns, lines, rules=_rules(rows))


def worst_texts(rows: Sequence[CombinedRow]) -> list[list[str]]:
    """Cells for each row's worst task and the share of its gap; no cells if no row has one."""
    names = short_names(rows[0].tasks)
    return worst_cells(
        [
            (names[row.worst_task], row.worst_recovered_gap) if row.worst_task else None
            for row in rows
        ]
    )


def task_grid(combined: Combined, suite: str) -> Grid:
    """Mean accuracy per task; the best merged model of each column stands out."""
    rows = displayed_rows(combined, suite)
    tasks = rows[0].tasks
    names = short_names(tasks)
    values = [[row.accuracy[task] for task in [*tasks, AVERAGE]] for row in rows]
    best = best_cells(values, [row.name not in (BASE, EXPERTS) for row in rows])
    lines = [
        (row_head(row), [percent(value) for value in cells])
        for row, cells in zip(rows, values, strict=True)
    ]
    return Grid("accuracy, %", [*names.values(), AVERAGE], lines, best, _rules(rows))


def row_head(row: CombinedRow) -> str:
    """A repaired model stands under its upstream merger, as `+ name`."""
    return f"+ {row.name}" if row.upstream and _is_repair(row) else row.name


def displayed_rows(combined: Combined, suite: str) -> list[CombinedRow]:
    """References first and once, if all upstream mergers agree on them; then merger by merger."""
    rows = [row for row in combined.rows if row.suite == suite]
    references: dict[tuple[Any, ...], CombinedRow] = {}
    for row in rows:
        if row.name in (BASE, EXPERTS):
            references.setdefault((row.name, *row.accuracy.values()), row)
    order = sorted(references.values(), key=lambda row: row.name != BASE)
    others = [row for row in rows if row.name not in (BASE, EXPERTS)]
    # The merger comes before what repairs it, whatever order the report had.
    mergers = list(dict.fromkeys(row.upstream for row in others))
    others.sort(key=lambda row: (mergers.index(row.upstream), row.name != row.upstream))
    return order + others


def _rules(rows: list[CombinedRow]) -> frozenset[int]:
    """Lines after which another upstream merger begins."""
    keys = ["" if row.name in (BASE, EXPERTS) else row.upstream for row in rows]
    return frozenset(line for line in range(len(keys) - 1) if keys[line] != keys[line + 1])


def _is_repair(row: CombinedRow) -> bool:
    return row.name not in (BASE, EXPERTS, row.upstream)


def average_text(row: CombinedRow) -> str:
    """Average in per cent, with its deviation over runs."""
    spread = f" ± {percent(row.deviation[AVERAGE])}" if row.deviation else ""
    return percent(row.accuracy[AVERAGE]) + spread


def gain_text(row: CombinedRow) -> str:
    """Gain over the upstream merger in points, with its interval; a dash for the merger itself."""
    if row.gain is None or not _is_repair(row):
        return _ABSENT
    text = f"{100 * row.gain:+.1f}"
    limits = row.gain_interval
    return text + (f" [{100 * limits.low:+.1f}, {100 * limits.high:+.1f}]" if limits else "")


def recovered_text(row: CombinedRow) -> str:
    """Recovered gap in per cent, with its interval; a dash where it says nothing."""
    if row.recovered_gap is None or row.name == BASE:
        return _ABSENT
    text = f"{100 * row.recovered_gap:.0f} %"
    limits = row.recovered_gap_interval if _is_repair(row) else None
    return text + (f" [{100 * limits.low:.0f}, {100 * limits.high:.0f}]" if limits else "")


def _with_limits(value: float | None, limits: Interval | None) -> list[str]:
    return [_number(value), _number(limits and limits.low), _number(limits and limits.high)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"
