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
"""(merger, cell) -> result; references have the merger None."""


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
        folder: The folder of the comparison.
        suite: Name of the model pool.
        grid: The grid that was run.
        results: The finished cells.
        failed: Cells that gave no result.
        seed: The comparison's seed.
        notes: Name of a merger or cell -> what a reader must know about it.
        device: The device of the run.

    Returns:
        The comparison; None if no merger gave any result.

    Raises:
        ReportError: If something cannot be written.
    """
    written = []
    for merger in (merger.name for merger in grid.mergers):
        report = _upstream_report(suite, merger, results, failed, notes, device)
        report.seeds[COMPARISON_SEED] = seed
        place = folder / merger
        if set(report.rows) <= {BASE, EXPERTS}:
            # One of an earlier run would be taken for this one's.
            shutil.rmtree(place, ignore_errors=True)
            continue
        report.write(place)
        curves = {cell: r.curves for (owner, cell), r in results.items() if owner == merger}
        write_curves(place, curves)
        written.append(place)
    if not written:
        return None
    summary = summarise(written, failed)
    write_side_by_side(summary, folder)
    draw_figures(folder, written)
    return summary


def check_places(folder: Path, grid: Grid) -> None:
    """Refuse folders that the reports cannot be written to, before hours of work.

    Raises:
        ReportError: Naming what is in the way.
    """
    refuse_run(folder, LOG_DIR_SETTING)
    for place in (folder, *(folder / merger.name for merger in grid.mergers)):
        folders = [path for path in place.glob("report.*") if path.is_dir()]
        for obstacle in [place] if place.is_file() else folders:
            raise ReportError(
                f"{obstacle} is in the way of a report: remove it, or change {LOG_DIR_SETTING}"
            )


def draw_figures(folder: Path, runs: Sequence[Path]) -> None:
    """Draw what `featcal plot` draws; where that cannot be, the reports stand without."""
    try:
        for run in runs:
            plot_run(run)
        plot_comparison(folder)
    except ReportError as error:
        log.warning("not all figures were drawn: %s", error)


def _upstream_report(
    suite: str,
    merger: str,
    results: Results,
    failed: Sequence[FailedCell],
    notes: Mapping[str, str],
    device: Any,
) -> Report:
    """The report of one upstream merger: references, the merger, and the cells on it."""
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
        texts = [*([notes[name]] if name in notes else []), *result.notes]
        report.notes += [f"{name}: {text}" for text in texts]
    report.notes += tasks_below_merged(report)
    report.notes += [
        f"{merger}, {cell.name} failed: {cell.reason}" for cell in failed if cell.upstream == merger
    ]
    return report
