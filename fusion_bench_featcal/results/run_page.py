"""The report of one run as text: tables for the terminal, and the page `report.md`."""

from dataclasses import replace
from typing import TYPE_CHECKING

from fusion_bench_featcal.plurals import counted

from .long_table import AVERAGE, BASE, EXPERTS, merged_by, samples_range
from .run_rows import RunRows
from .tables import (
    WORST,
    Grid,
    accuracy_grid,
    bullets,
    console,
    loss_grid,
    mapping_grid,
    page,
    print_page,
    titled,
    with_unit,
    worst_cells,
)

if TYPE_CHECKING:
    from rich.table import Table


def print_run(report: RunRows, *, losses: bool = False) -> None:
    """Print the tables to stdout, and under them what was calibrated with what, and where."""
    width = console().width
    tables = run_tables(report, width)
    if losses and report.loss:
        tables += titled("loss", loss_grid(report.loss, report.tasks).fitting(width))
    print_page(tables, [*provenance(report), *_notes(report)])


def run_tables(report: RunRows, width: int) -> "list[Table]":
    """Lay the report out for `width` columns: one table, else a summary and the tasks."""
    grid, tasks = report_grid(report), len(report.tasks)
    if grid.width() <= width:
        return titled(run_title(report), [grid])
    summary = titled(run_title(report), grid.part(tasks).split(width))
    return summary + titled("accuracy per task, %", grid.part(0, tasks).fitting(width))


def run_markdown(report: RunRows) -> str:
    """Return the text of `report.md`: the table, then everything needed to judge it."""
    sections = {
        "Loss": loss_grid(report.loss, report.tasks).markdown() if report.loss else "",
        "Settings": mapping_grid(report.settings).markdown() if report.settings else "",
        "Cost": mapping_grid(report.cost).markdown() if report.cost else "",
        "Versions": bullets(f"{key}: {value}" for key, value in report.versions.items()),
        "Device": bullets(f"{key}: {value}" for key, value in report.device.items()),
    }
    return page(
        f"# {run_title(report)}",
        report_grid(report).for_page().markdown(),
        "Accuracy in per cent. *Recovered gap*: (row - merged) / (experts - merged) on the "
        f"average, where merged is `{report.upstream}`. *Worst task*: the one with the smallest "
        "share recovered (of the tasks with a gap of a point or more). Bold: best merged model of "
        "a column.",
        [*provenance(report), *_notes(report)],
        *(part for title, text in sections.items() if text for part in (f"## {title}", text)),
    )


def run_title(report: RunRows) -> str:
    """Suite and upstream merger of a run."""
    return f"{report.suite}, {merged_by(report.upstream)}"


def report_grid(report: RunRows) -> Grid:
    """Rows by tasks, average, recovered gap and worst task; the best of each column stands out."""
    merged = [name for name in report.rows if name not in (BASE, EXPERTS)]
    competing = merged if len(merged) > 1 else []
    rows = [(name, row, name in competing) for name, row in report.rows.items()]
    grid = accuracy_grid(rows, report.tasks)
    worst = [report.worst(name) for name in report.rows]
    lines = []
    for (name, cells), of_row in zip(grid.lines, worst, strict=True):
        # Base is not an attempt to repair the merged model: its share says nothing.
        share = None if name == BASE else report.share(name, AVERAGE)
        last = worst_cells(of_row, report.tasks).values() if any(worst) else ()
        lines.append((name, [*cells, with_unit(share), *last]))
    columns = [*grid.columns, "recovered gap", *(WORST if any(worst) else ())]
    return replace(grid, columns=columns, lines=lines)


def provenance(report: RunRows) -> list[str]:
    """Sentences under a table: what was calibrated with what, and where."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, tasks in report.samples.items():
        groups.setdefault(tuple(samples_range(tasks.values())), []).append(name)
    lines = [
        f"{', '.join(names)}: {counted(drawn[0], 'sample')} per task from the {drawn[1]} split"
        for drawn, names in groups.items()
        if drawn
    ]
    seconds = {name: cost.get("seconds") for name, cost in report.cost.items()}
    times = [f"{name} {s:.1f} s" for name, s in seconds.items() if isinstance(s, (int, float))]
    seeds = [f"{name} {seed}" for name, seed in report.seeds.items()]
    place = [str(report.device[key]) for key in ("device", "cpu") if key in report.device]
    lines += [f"calibration time: {', '.join(times)}"] if times else []
    last = [f"seeds: {', '.join(seeds)}"] if seeds else []
    last += [", ".join(place)] if place else []
    return lines + (["; ".join(last)] if last else [])


def _notes(report: RunRows) -> list[str]:
    return [f"note: {note}" for note in report.notes]
