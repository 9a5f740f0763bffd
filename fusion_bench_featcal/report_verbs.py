"""The verb `featcal report`, which reads the files of runs and loads no model."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fusion_bench_featcal.results.find import ResultFolders


def report_command(options: argparse.Namespace) -> None:
    """Print (and with --out write) the tables of runs, comparisons and studies from their files."""
    from fusion_bench_featcal.results.find import find

    if options.html:
        _write_html(options)
        return
    folders = find(options.runs)
    folders.refuse_studies_with(folders.runs or folders.studies[1:] or options.against)
    if folders.studies:
        _report_study(folders.studies[0], options)
    else:
        _report_runs(folders, options)


def _report_study(folder: Path, options: argparse.Namespace) -> None:
    from fusion_bench_featcal.results.study import Study

    study = Study.load(folder)
    written = study.write(options.out, "--out") if options.out else None
    study.show()
    if written:
        print(f"written: {written.parent}")
    if options.figures:
        _save_figures(study.figures(), options.figures)


def _report_runs(folders: "ResultFolders", options: argparse.Namespace) -> None:
    from fusion_bench_featcal.results import Report, ReportError, views
    from fusion_bench_featcal.results.against import show_against
    from fusion_bench_featcal.results.summary import summarise

    if not folders.runs:
        raise ReportError(f"no run in or below {', '.join(options.runs)}")
    summary = summarise(folders.runs, folders.failed)
    if options.against:
        show_against(summary, options.against)
        return
    write = views.write_side_by_side if folders.comparisons else views.write_combined
    # Write first: a reader who sees the table can rely on the files.
    written = write(summary, options.out, "--out") if options.out else None
    if folders.comparisons:
        views.show_side_by_side(summary)
    elif len(folders.runs) == 1:
        views.show_one_run(Report.load(folders.runs[0]), summary)
        _report_diagnosis(folders.runs[0])
    else:
        views.show_combined(summary)
    if written:
        print(f"written: {written.parent}")
    if options.figures:
        from fusion_bench_featcal.results.figures import figures_of

        _save_figures(figures_of(summary), options.figures)


def _save_figures(figures: "Mapping[str, Figure]", folder: str) -> None:
    """Write the figures of --figures."""
    from fusion_bench_featcal.results import charts

    for path in charts.save(figures, folder, "--figures"):
        print(f"written: {path}")


def _report_diagnosis(run: Path) -> None:
    """Print the tables and sentences of a diagnosis, if there is one."""
    from fusion_bench_featcal.results.diagnosis import diagnosis_grids, diagnosis_sentences
    from fusion_bench_featcal.results.lines import LINES_FILE, read_lines
    from fusion_bench_featcal.results.tables import console, print_page, titled

    if not (run / LINES_FILE).exists():
        return
    lines = read_lines(run / LINES_FILE)
    grids = {title: grid.fitting(console().width) for title, grid in diagnosis_grids(lines).items()}
    print()
    print_page(
        [table for title, forms in grids.items() for table in titled(title, forms)],
        diagnosis_sentences(lines),
    )


def _write_html(options: argparse.Namespace) -> None:
    """Write the page of --html, and nothing else."""
    from fusion_bench_featcal.results import ReportError
    from fusion_bench_featcal.results.find import find
    from fusion_bench_featcal.results.html import check_target, write_page
    from fusion_bench_featcal.settings import FeatCalSettings

    for name in ("against", "out", "figures"):
        if getattr(options, name):
            raise ReportError(f"--html writes a page and nothing else: leave out --{name}")
    page = check_target(Path(options.html))
    folders = find(options.runs, tables=True)
    print(f"written: {write_page(page, folders, asdict(FeatCalSettings()))}")
