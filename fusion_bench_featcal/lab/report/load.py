"""Results of runs, comparisons and diagnoses in Python, as one long table."""

from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fusion_bench_featcal.lab.report.find import find
from fusion_bench_featcal.results.cells import load_cells
from fusion_bench_featcal.results.long_table import LINES_FILE, VALUE, Line, read_lines
from fusion_bench_featcal.results.report import Report
from fusion_bench_featcal.results.runs import check_averages

from .points import points_of_cells


def load(folder: str | Path) -> Any:
    """Return all measured values in or below a folder, one number per line.

    Args:
        folder: The folder of a run, a comparison, its finished cells or a diagnosis, or a parent of
            some.

    Returns:
        A line per number with the dimensions suite, merger, row, task, block, class, seed and
        metric, the settings that differ between cells, and `value`: a pandas DataFrame, or a list
        of dicts if pandas is not installed.

    Raises:
        ReportError: If there are no results, a file is damaged, or runs must not be averaged,
            because runs of one suite have different tasks, test sets or settings of a row.
    """
    lines = long_table(_reports(folder))
    if find_spec("pandas") is None:
        return lines
    from pandas import DataFrame

    return DataFrame(lines)


def load_notes(folder: str | Path) -> list[dict[str, str]]:
    """Return the notes of all runs in or below a folder: suite, kind, merger, row, task, text."""
    reports = _reports(folder).values()
    notes = dict.fromkeys((report.suite, note) for report in reports for note in report.notes)
    return [{"suite": suite, **asdict(note)} for suite, note in notes]


def long_table(reports: Mapping[Path, Report]) -> list[Line]:
    """Return the lines of runs. If lines differ only in their value, the first one is used.

    Raises:
        ReportError: If runs with equal labels must not be averaged, or a file is damaged.
    """
    points: dict[str, dict[Path, Report]] = {}
    for run, report in reports.items():
        points.setdefault(str(sorted(report.labels.items())), {})[run] = report
    for point in points.values():
        check_averages(point)
    lines: dict[tuple[Any, ...], Line] = {}
    for run, report in reports.items():
        path = run / LINES_FILE
        for line in read_lines(path) if path.exists() else report.lines():
            key = tuple(item for item in line.items() if item[0] != VALUE)
            lines.setdefault(key, line)
    return list(lines.values())


def _reports(folder: str | Path) -> dict[Path, Report]:
    folders = find([folder])
    reports = {run: Report.load(run) for run in folders.runs}
    for folder_of_cells in folders.cells:
        for number, point in enumerate(points_of_cells(load_cells(folder_of_cells))):
            reports |= {folder_of_cells / f"{number}" / run: r for run, r in point.reports.items()}
    return reports
