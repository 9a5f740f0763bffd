"""The verb `featcal report`, which reads the files of runs and loads no model."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fusion_bench_featcal.lab.report.find import ResultFolders
    from fusion_bench_featcal.lab.report.page import Page
    from fusion_bench_featcal.lab.report.points import Point
    from fusion_bench_featcal.results.summary import Summary


def report(options: argparse.Namespace) -> None:
    """Print (and with --out write) the tables of runs and comparisons from their files."""
    from fusion_bench_featcal.lab.report.find import find
    from fusion_bench_featcal.lab.report.page import check_target

    if options.html:
        check_target(Path(options.html))
    folders = find(options.runs)
    points = _points(folders)
    if len(points) > 1:
        _report_points(points, folders, options)
    else:
        _report_runs(points[0].summary, folders, options)


def _points(folders: "ResultFolders") -> "list[Point]":
    """Return the runs or cells by the settings that differ."""
    from fusion_bench_featcal.lab.report.points import points_of_cells, points_of_runs
    from fusion_bench_featcal.results import Report, ReportError
    from fusion_bench_featcal.results.cells import load_cells

    if not folders.cells:
        if not folders.runs:
            raise ReportError("no run there has a result")
        return points_of_runs({run: Report.load(run) for run in folders.runs})
    if folders.runs or folders.comparisons or folders.cells[1:]:
        raise ReportError(f"{folders.cells[0]} has cells: report it by itself")
    return points_of_cells(load_cells(folders.cells[0]))


def _report_points(
    points: "Sequence[Point]", folders: "ResultFolders", options: argparse.Namespace
) -> None:
    from fusion_bench_featcal.lab.report import points as views
    from fusion_bench_featcal.lab.report.page import page_of_points
    from fusion_bench_featcal.results import ReportError

    if options.against:
        labels = "; ".join(views.label_text(point.labels) for point in points[:3])
        raise ReportError(f"--against compares rows of one point, and there are several: {labels}")
    written = views.write(points, options.out, "--out") if options.out else None
    views.show(points)
    if written:
        print(f"written: {written.parent}")
    _write_views(options, partial(views.figures, points), partial(page_of_points, folders, points))


def _report_runs(summary: "Summary", folders: "ResultFolders", options: argparse.Namespace) -> None:
    from fusion_bench_featcal.lab.report import views
    from fusion_bench_featcal.lab.report.against import show_against
    from fusion_bench_featcal.lab.report.figures import figures_of
    from fusion_bench_featcal.lab.report.page import page_of_runs
    from fusion_bench_featcal.results import Report

    summary = replace(summary, failed=folders.failed)
    if options.against:
        show_against(summary, options.against)
        return
    # Files are written first, so that they exist when the table appears.
    written = views.write(summary, options.out, "--out") if options.out else None
    if len(folders.runs) == 1:
        Report.load(folders.runs[0]).show()
        _report_diagnosis(folders.runs[0])
    else:
        views.show(summary)
    if written:
        print(f"written: {written.parent}")
    _write_views(options, partial(figures_of, summary), partial(page_of_runs, folders, summary))


def _write_views(
    options: argparse.Namespace,
    figures: "Callable[[], Mapping[str, Figure]]",
    page: "Callable[[], Page]",
) -> None:
    """Write the figures of --figures and the page of --html."""
    from fusion_bench_featcal.lab.report import charts
    from fusion_bench_featcal.lab.report.page import write_page

    for path in charts.save(figures(), options.figures, "--figures") if options.figures else ():
        print(f"written: {path}")
    if options.html:
        print(f"written: {write_page(Path(options.html), page())}")


def _report_diagnosis(run: Path) -> None:
    """Print the tables and sentences of a diagnosis, if there is one."""
    from fusion_bench_featcal.lab.report.diagnosis import (
        diagnosis_grids,
        diagnosis_of,
        diagnosis_sentences,
    )
    from fusion_bench_featcal.results.tables import console, print_page, titled

    lines = diagnosis_of(run)
    if not lines:
        return
    grids = {title: grid.fitting(console().width) for title, grid in diagnosis_grids(lines).items()}
    print()
    print_page(
        [table for title, forms in grids.items() for table in titled(title, forms)],
        diagnosis_sentences(lines),
    )
