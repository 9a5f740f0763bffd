"""The verb `featcal report`, which reads the files of runs and loads no model."""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fusion_bench_featcal.lab.report.find import ResultFolders
    from fusion_bench_featcal.lab.report.page import Page


def report(options: argparse.Namespace) -> None:
    """Print (and with --out write) the tables of runs, comparisons and studies from their files."""
    from fusion_bench_featcal.lab.report.find import find
    from fusion_bench_featcal.lab.report.page import check_target

    if options.html:
        check_target(Path(options.html))
    folders = find(options.runs)
    folders.refuse_studies_with(folders.runs or folders.studies[1:] or options.against)
    if folders.studies:
        _report_study(folders.studies[0], options)
    else:
        _report_runs(folders, options)


def _report_study(folder: Path, options: argparse.Namespace) -> None:
    from fusion_bench_featcal.lab.report.page import page_of_study
    from fusion_bench_featcal.lab.report.study import Study

    study = Study.load(folder)
    written = study.write(options.out, "--out") if options.out else None
    study.show()
    if written:
        print(f"written: {written.parent}")
    _write_views(options, study.figures, partial(page_of_study, folder, study))


def _report_runs(folders: "ResultFolders", options: argparse.Namespace) -> None:
    from fusion_bench_featcal.lab.report import views
    from fusion_bench_featcal.lab.report.against import show_against
    from fusion_bench_featcal.lab.report.figures import figures_of
    from fusion_bench_featcal.lab.report.page import page_of_runs
    from fusion_bench_featcal.results import Report, ReportError
    from fusion_bench_featcal.results.report import summarise

    if not folders.runs:
        raise ReportError(f"no run in or below {', '.join(options.runs)}")
    summary = summarise(folders.runs, folders.failed)
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
