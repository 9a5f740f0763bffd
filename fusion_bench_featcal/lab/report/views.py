"""Tables of several runs on the terminal, as Markdown, CSV and JSON."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, prepare_directory, write_atomic
from fusion_bench_featcal.json_files import plain
from fusion_bench_featcal.results.columns import Column, with_values
from fusion_bench_featcal.results.report_files import addresses, write_files
from fusion_bench_featcal.results.schema import COMPARISON_KIND, SCHEMA
from fusion_bench_featcal.results.summary import FailedCell, Summary, SummaryRow
from fusion_bench_featcal.results.tables import (
    ABSENT,
    Grid,
    accuracy_grid,
    console,
    loss_grid,
    page,
    print_page,
    titled,
)
from fusion_bench_featcal.results.views import meanings, note_lines

from .columns import ACCURACY, COSTS, csv_line
from .find import refuse_run

_FAILED = "failed"
TASKS = "accuracy per task"


def show(summary: Summary) -> None:
    """Print the tables of several runs, and the meaning of the numbers."""
    width = console().width
    tables = [
        table
        for suite in summary.suites
        for title, grid in suite_grids(summary, suite).items()
        for table in titled(
            f"{suite}: {title}", grid.fitting(width) if title == TASKS else grid.split(width)
        )
    ]
    print_page(tables, sentences(summary))


def write(summary: Summary, directory: str | Path, setting: str = LOG_DIR_SETTING) -> Path:
    """Write `report.csv`, `report.md` and, last, `report.json`. Returns the path of the last one.

    Raises:
        ReportError: If the folder cannot be written, or has the report of a run.
    """
    refuse_run(directory, setting)
    directory = prepare_directory(directory, setting)
    rows = [row for suite in summary.suites for row in summary.displayed(suite)]
    content = {
        "kind": COMPARISON_KIND,
        "schema": SCHEMA,
        "suite": ", ".join(summary.suites),
        "seeds": summary.seeds,
        "rows": plain([asdict(row) | {"runs": len(row.run_seeds)} for row in rows], "rows"),
        "failed": [asdict(cell) for cell in summary.failed],
        "notes": [asdict(note) for note in summary.notes],
        # The folder represents these runs only, not those of an earlier comparison in it.
        "runs": addresses(summary.runs, directory),
    }
    lines = [{**csv_line(row), "status": "finished"} for row in rows]
    lines += [
        {
            "suite": content["suite"], "upstream": cell.upstream, "name": cell.name,
            "seeds": cell.seed, "status": f"{_FAILED}: {cell.reason}",
        }
        for cell in summary.failed
    ]  # fmt: skip
    write_atomic(directory / "report.csv", _csv_text(lines), setting)
    return write_files(directory, content, _markdown(summary), setting)


def _csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a head with the keys of all lines, and the lines, as CSV. Missing cells are empty."""
    heads = dict.fromkeys(key for line in lines for key in line)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(heads), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _markdown(summary: Summary) -> str:
    paragraphs: list[Any] = []
    for suite in summary.suites:
        for title, grid in suite_grids(summary, suite).items():
            paragraphs += [f"## {suite}: {title}", grid.for_page().markdown()]
        if losses := losses_of(summary, suite):
            paragraphs += [f"## {suite}: loss", losses.markdown()]
    runs = [f"`{run}`" for run in summary.runs]
    return page(
        "# Report of several runs", *paragraphs, "## Notes", sentences(summary), "## Runs", runs
    )


def suite_grids(summary: Summary, suite: str) -> dict[str, Grid]:
    """Return the tables of a suite's rows by title: accuracy, accuracy per task, costs."""
    rows = summary.displayed(suite)
    failed = [cell for cell in summary.failed if len(summary.suites) == 1]
    grids = {
        "accuracy": _rows_grid("accuracy, %", ACCURACY, rows, failed),
        TASKS: task_grid(rows),
    }
    if with_values(COSTS, rows):
        grids["costs"] = _rows_grid("", COSTS, rows)
    return grids


def task_grid(rows: Sequence[SummaryRow]) -> Grid:
    """Return mean accuracy per task. The best merged model of each column is highlighted."""
    lines = [(_head(row), row.accuracy, not row.is_reference) for row in rows]
    return accuracy_grid(lines, rows[0].tasks, _rules(map(_section, rows)))


def losses_of(summary: Summary, suite: str) -> Grid | None:
    """Return loss per task, or None if no row of the suite has one."""
    rows = [row for row in summary.displayed(suite) if row.loss]
    losses = {
        f"{row.upstream} + {row.name}" if row.is_repair else row.name: row.loss for row in rows
    }
    return loss_grid(losses, rows[0].tasks) if rows else None


def sentences(summary: Summary) -> list[str]:
    """Return failed cells, the meaning of columns with values, and the runs' notes."""
    lines = legend(summary) + [f"note: {note}" for note in note_lines(summary)]
    return failures(summary.failed) + lines


def legend(summary: Summary) -> list[str]:
    """Return the meaning of the tables of several runs."""
    seeds = ", ".join(map(str, summary.seeds))
    lines = [f"means over comparisons with the seeds {seeds}"] if len(summary.seeds) > 1 else []
    return lines + meanings(summary, [*ACCURACY, *COSTS])


def failures(failed: Iterable[FailedCell]) -> list[str]:
    """Return a sentence for each failed cell."""
    lines = []
    for cell in failed:
        seed = "" if cell.seed is None else f" (seed {cell.seed})"
        name = f"{cell.upstream or 'reference'}, {cell.name}"
        lines.append(f"{name} failed{seed}: {cell.reason}")
    return lines


def _rows_grid(
    corner: str,
    columns: Sequence[Column],
    rows: Sequence[SummaryRow],
    failed: Iterable[FailedCell] = (),
) -> Grid:
    """Return rows, and failed cells, each under its upstream merger."""
    displayed_columns = with_values(columns, rows)
    lines = [
        (_section(row), _head(row), [column.cell(row) for column in displayed_columns])
        for row in rows
    ]
    for upstream, name in dict.fromkeys((cell.upstream, cell.name) for cell in failed):
        head = name if upstream in (None, name) else f"+ {name}"
        lines.append((upstream or "", head, [_FAILED, *[ABSENT] * (len(displayed_columns) - 1)]))
    sections = list(dict.fromkeys(section for section, _, _ in lines))
    lines.sort(key=lambda line: sections.index(line[0]))
    if any(row.deviation for row in rows):
        corner = "mean over runs" + ", %" * corner.endswith("%")
    cells = [(head, texts) for _, head, texts in lines]
    heads = [column.head for column in displayed_columns]
    return Grid(corner, heads, cells, rules=_rules(section for section, _, _ in lines))


def _head(row: SummaryRow) -> str:
    """Return a row's name, under its upstream merger as `+ name`."""
    return f"+ {row.name}" if row.upstream and row.is_repair else row.name


def _section(row: SummaryRow) -> str | None:
    return "" if row.is_reference else row.upstream


def _rules(sections: Iterable[str | None]) -> frozenset[int]:
    """Return the lines after which another section begins."""
    keys = list(sections)
    return frozenset(line for line in range(len(keys) - 1) if keys[line] != keys[line + 1])
