"""Tables of one run on the terminal and as Markdown, and the sentences below tables."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fusion_bench_featcal.plurals import counted

from .columns import ONE_RUN, Column, with_values
from .intervals import LEVEL
from .long_table import BASE, EXPERTS, merged_by
from .measures import samples_range
from .notes import FAILED, chosen
from .run_rows import RunRows
from .summary import Summary, SummaryRow, summarise_reports
from .tables import (
    Grid,
    accuracy_grid,
    bullets,
    console,
    loss_grid,
    mapping_grid,
    page,
    print_page,
    titled,
)


def show_run(report: RunRows, *, losses: bool = False) -> None:
    """Print the table of a run, the conditions of its rows, and the meaning of the numbers.

    Args:
        report: The run's report.
        losses: Print a table of losses too, if there are any.
    """
    width, summary = console().width, summarise_reports({Path(): report})
    tables = titled(run_title(report), run_grid(report, summary).fitting(width))
    if losses and report.loss:
        tables += titled("loss", loss_grid(report.loss, report.tasks).fitting(width))
    print_page(tables, [*provenance(report), *explanations(summary, ONE_RUN)])


def run_markdown(report: RunRows) -> str:
    """Return the text of a run's `report.md`."""
    summary = summarise_reports({Path(): report})
    sections = {
        "Loss": loss_grid(report.loss, report.tasks).markdown() if report.loss else "",
        "Settings": mapping_grid(report.settings).markdown() if report.settings else "",
        "Cost": mapping_grid(report.cost).markdown() if report.cost else "",
        "Versions": bullets(f"{key}: {value}" for key, value in report.versions.items()),
        "Device": bullets(f"{key}: {value}" for key, value in report.device.items()),
    }
    return page(
        f"# {run_title(report)}",
        run_grid(report, summary).for_page().markdown(),
        [*provenance(report), *explanations(summary, ONE_RUN)],
        *(part for title, text in sections.items() if text for part in (f"## {title}", text)),
    )


def run_title(report: RunRows) -> str:
    """Return suite and upstream merger of a run."""
    return f"{report.suite}, {merged_by(report.upstream)}"


def run_grid(report: RunRows, summary: Summary) -> Grid:
    """Return accuracy per task and average of a run's rows, with derived values."""
    rows = {row.name: row for row in summary.rows}
    merged = [name for name in report.rows if name not in (BASE, EXPERTS)]
    competing = merged if len(merged) > 1 else []
    lines = [(name, row, name in competing) for name, row in report.rows.items()]
    grid = accuracy_grid(lines, report.tasks)
    columns = with_values(ONE_RUN, list(rows.values()))
    return replace(
        grid,
        columns=[*grid.columns, *(column.head for column in columns)],
        lines=[
            (name, [*cells, *(column.cell(rows[name]) for column in columns)])
            for name, cells in grid.lines
        ],
    )


def provenance(report: RunRows) -> list[str]:
    """Return sentences on the samples, settings and machine of the rows."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, tasks in report.samples.items():
        groups.setdefault(tuple(samples_range(tasks.values())), []).append(name)
    lines = [
        f"{', '.join(names)}: {counted(draw[0], 'sample')} per task from the {draw[1]} split"
        for draw, names in groups.items()
        if draw
    ]
    seeds = ", ".join(f"{name} {seed}" for name, seed in report.seeds.items())
    machine = ", ".join(
        str(report.device[key]) for key in ("device", "cpu") if key in report.device
    )
    last = [f"seeds {seeds}"] if seeds else []
    last += [f"on {machine}"] if machine else []
    return [*lines, ", ".join(last)] if last else lines


def explanations(summary: Summary, columns: Iterable[Column]) -> list[str]:
    """Return the meaning of columns that have values, and the runs' notes."""
    return meanings(summary, columns) + [f"note: {note}" for note in note_lines(summary)]


def meanings(summary: Summary, columns: Iterable[Column]) -> list[str]:
    """Return the meaning of columns that have values."""
    displayed_columns = with_values(columns, summary.rows)
    accuracy = "accuracy in per cent" + spread_meaning(summary.rows)
    return [accuracy, *(column.meaning for column in displayed_columns if column.meaning)]


def note_lines(summary: Summary) -> list[str]:
    """Return the runs' notes, except for cells already listed as failed."""
    listed = [FAILED] if summary.failed else []
    return [note.sentence_of_several for note in chosen(summary.notes, *listed)]


def spread_meaning(rows: Sequence[SummaryRow]) -> str:
    """Return the meaning of ±, if a row has several runs."""
    draws = sorted({len(row.run_seeds) for row in rows if row.deviation})
    if not draws:
        return ""
    return (
        f", mean over {' or '.join(map(str, draws))} runs, ± half of the {100 * LEVEL:.0f} % "
        "interval of this mean (Student's t)"
    )
