"""Finished cells as reports: one per upstream merger, and all side by side."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusion_bench_featcal.comparison.grid import NONE, Grid
from fusion_bench_featcal.comparison.store import CellResult
from fusion_bench_featcal.files import LOG_DIR_SETTING
from fusion_bench_featcal.results import (
    BASE,
    EXPERTS,
    Report,
    ReportError,
    describe_device,
    versions,
)
from fusion_bench_featcal.results.comparison_figures import plot_comparison
from fusion_bench_featcal.results.curves import write_curves
from fusion_bench_featcal.results.figures import plot_run
from fusion_bench_featcal.results.find import FailedCell, refuse_run
from fusion_bench_featcal.results.remarks import tasks_below_merged
from fusion_bench_featcal.results.summary import COMPARISON_SEED, Summary, summarise
from fusion_bench_featcal.results.views import write_side_by_side

log = logging.getLogger(__name__)

Results = Mapping[tuple[str | None, str], CellResult]


def write_reports(
    folder: Path,
    suite: str,
    grid: Grid,
    results: Results,
    failed: Sequence[FailedCell],
    *,
    seed: int,
    notes: Mapping[str, str],
    device: Any,
) -> Summary | None:
    """Write each upstream merger's report to a folder of its name, and the comparison; draw both.

    Args:
        folder: Where to.
        suite: Name of the model pool.
        grid: What was run.
        results: (merger, cell) -> result; references have the merger None.
        failed: Cells that gave none.
        seed: The comparison's seed.
        notes: Name of a merger or cell -> what a reader must know about it.
        device: What the run computed on.

    Returns:
        The comparison; None if no merger gave any result.

    Raises:
        ReportError: If something cannot be written.
    """
    written = []
    for merger in grid.mergers:
        report = upstream_report(suite, merger.name, results, failed, notes, device)
        report.seeds[COMPARISON_SEED] = seed
        place = folder / merger.name
        if set(report.rows) <= {BASE, EXPERTS}:
            # One of an earlier run would be taken for this one's.
            shutil.rmtree(place, ignore_errors=True)
            continue
        report.write(place)
        mine = {cell: result for (owner, cell), result in results.items() if owner == merger.name}
        write_curves(place, {cell: result.curves for cell, result in mine.items()})
        written.append(place)
    if not written:
        return None
    summary = summarise(written, failed)
    write_side_by_side(summary, folder)
    draw_figures(folder, written)
    return summary


def check_places(folder: Path, grid: Grid) -> None:
    """Refuse folders that the reports cannot be written to, before hours of work.

    Args:
        folder: Where the reports will be written to.
        grid: What will be run.

    Raises:
        ReportError: Naming what is in the way.
    """
    refuse_run(folder, LOG_DIR_SETTING)
    for place in (folder, *(folder / merger.name for merger in grid.mergers)):
        folders = [path for path in place.glob("report.*") if path.is_dir()]
        in_the_way = [place] if place.is_file() else folders
        if in_the_way:
            raise ReportError(
                f"{in_the_way[0]} is in the way of a report: remove it, or change {LOG_DIR_SETTING}"
            )


def draw_figures(folder: Path, runs: Sequence[Path]) -> None:
    """Draw what `featcal plot` draws; where that cannot be, the reports stand without."""
    try:
        for run in runs:
            plot_run(run)
        plot_comparison(folder)
    except ReportError as error:
        log.warning("not all figures were drawn: %s", error)


def upstream_report(
    suite: str,
    merger: str,
    results: Results,
    failed: Sequence[FailedCell],
    notes: Mapping[str, str],
    device: Any,
) -> Report:
    """The report of one upstream merger: references, the merger, and what was run on it."""
    report = Report(
        suite=suite, upstream=merger, versions=versions(), device=describe_device(device)
    )
    for (owner, cell), result in results.items():
        if owner not in (None, merger):
            continue
        name = merger if cell == NONE else cell
        report.add_row(
            name,
            result.accuracy,
            settings=result.settings or None,
            cost=result.cost or None,
            samples=result.samples or None,
            correct=result.correct,
            loss=result.loss,
        )
        if result.seed is not None:
            report.seeds[name] = result.seed
        if name in notes:
            report.notes.append(f"{name}: {notes[name]}")
        report.notes += [f"{name}: {note}" for note in result.notes]
    report.notes += tasks_below_merged(report)
    report.notes += [
        f"{merger}, {cell.name} failed: {cell.reason}" for cell in failed if cell.upstream == merger
    ]
    return report
