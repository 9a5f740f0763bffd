"""Finished cells as reports: one per upstream merger, and a table of all."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from fusion_bench_featcal.files import LOG_DIR_SETTING
from fusion_bench_featcal.hub_files import commits
from fusion_bench_featcal.lab.compare.grid import NONE, Grid
from fusion_bench_featcal.lab.compare.inference import on_one_clock
from fusion_bench_featcal.lab.compare.runs import GridRun
from fusion_bench_featcal.lab.compare.store import CellResult
from fusion_bench_featcal.lab.report.find import refuse_run
from fusion_bench_featcal.results import (
    BASE,
    EXPERTS,
    Report,
    ReportError,
    describe_device,
    versions,
)
from fusion_bench_featcal.results.cost import RELATIVE_SECONDS, SECONDS_PER_SAMPLE
from fusion_bench_featcal.results.curves import write_curves
from fusion_bench_featcal.results.long_table import COMPARISON_SEED
from fusion_bench_featcal.results.notes import FAILED, NOTE, Note
from fusion_bench_featcal.results.remarks import tasks_below_merged


def write_reports(folder: Path, suite: str, run: GridRun) -> list[Path]:
    """Write each upstream merger's report to a folder with its name.

    Args:
        folder: Folder of these folders.
        suite: Name of the model pool.
        run: The grid with its finished and failed cells.

    Returns:
        The folders of the mergers that have results.

    Raises:
        ReportError: If a file cannot be written.
    """
    written = []
    for merger in (merger.name for merger in run.grid.mergers):
        report, merger_folder = (
            _merger_report(run.point.pool_name(suite), merger, run),
            folder / merger,
        )
        if set(report.rows) <= {BASE, EXPERTS}:
            # An earlier run's items must not be read as items of this run.
            shutil.rmtree(merger_folder, ignore_errors=True)
            continue
        report.labels = dict(run.point.labels)
        report.write(merger_folder)
        owned = {cell: result for (owner, cell), result in run.results.items() if owner == merger}
        write_curves(merger_folder, {cell: result.curves for cell, result in owned.items()})
        written.append(merger_folder)
    return written


def check_places(folder: Path, grid: Grid) -> None:
    """Refuse folders that reports cannot be written to, before hours of work.

    Raises:
        ReportError: Naming the obstacle.
    """
    refuse_run(folder, LOG_DIR_SETTING)
    for target in (folder, *(folder / merger.name for merger in grid.mergers)):
        folders = [path for path in target.glob("report.*") if path.is_dir()]
        for obstacle in [target] if target.is_file() else folders:
            raise ReportError(
                f"{obstacle} is in the way of a report: remove it, or change {LOG_DIR_SETTING}"
            )


def inference_seconds(
    results: Mapping[tuple[str | None, str], CellResult],
) -> dict[tuple[str | None, str], float]:
    """Return seconds per sample of all timed cells, corrected for the speed of the machine."""
    costs = {cell: result.cost for cell, result in results.items()}
    timed = {
        cell: (cost[SECONDS_PER_SAMPLE], cost[RELATIVE_SECONDS])
        for cell, cost in costs.items()
        if RELATIVE_SECONDS in cost
    }
    return dict(zip(timed, on_one_clock([*timed.values()]), strict=True)) if timed else {}


def _merger_report(suite: str, merger: str, run: GridRun) -> Report:
    """Return the report of one upstream merger: references, the merger, and the cells on it."""
    device, notes = describe_device(run.maker.inputs.fabric.device), run.notes
    report = Report(suite=suite, upstream=merger, versions=versions() | commits(), device=device)
    seconds = inference_seconds(run.results)
    for (owner, cell), result in run.results.items():
        if owner not in (None, merger):
            continue
        name, cost = merger if cell == NONE else cell, dict(result.cost)
        if (owner, cell) in seconds:
            cost[SECONDS_PER_SAMPLE] = seconds[owner, cell]
        report.add_row(
            name,
            result.accuracy,
            settings=result.settings or None,
            cost=cost or None,
            samples=result.samples or None,
            correct=result.correct,
            loss=result.loss,
        )
        if result.seed is not None:
            report.seeds[name] = result.seed
        texts = [*([notes[name]] if name in notes else []), *result.notes]
        report.note(*(Note(NOTE, text, name) for text in texts))
    report.seeds[COMPARISON_SEED] = run.point.seed
    report.note(*tasks_below_merged(report))
    failed = (cell for cell in run.failed if cell.upstream == merger)
    report.note(*(Note(FAILED, cell.reason, cell.name) for cell in failed))
    return report
