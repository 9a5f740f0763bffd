"""Runs that a page shows together: of one suite, with as many samples per task."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results.differences import row_name
from fusion_bench_featcal.results.find import ResultFolders
from fusion_bench_featcal.results.report import Report
from fusion_bench_featcal.results.summary import Summary, SummaryRow, summarise
from fusion_bench_featcal.results.written import load_table

_SAMPLES = "samples_per_task"


@dataclass(frozen=True)
class Group:
    """Rows of one suite."""

    suite: str
    samples: int | None  # per task; None where the page's runs do not differ in them
    rows: list[SummaryRow]
    summary: Summary
    reports: Mapping[Path, Report]  # empty where only written tables are left
    label: str = ""  # of such a table

    @property
    def title(self) -> str:
        """The suite, with what tells it from the page's other groups."""
        samples = "" if self.samples is None else counted(self.samples, "sample")
        return ", ".join(filter(None, (self.suite, samples, self.label)))

    def name_of(self, merger: str | None, row: str) -> str:
        """Name of a row, with its merger where the group has several."""
        mergers = {one.upstream for one in self.rows if not one.is_reference}
        return row_name((self.suite, merger, row)) if len(mergers) > 1 else row

    def name(self, row: SummaryRow) -> str:
        """The same of a summary's row."""
        return self.name_of(row.upstream, row.name)


def groups_of(folders: ResultFolders) -> list[Group]:
    """Divide runs by suite and samples per task; rows are averaged within a group.

    Raises:
        ReportError: As `summarise` does, where runs of a group contradict one another.
    """
    if not folders.runs:
        return [group for table in folders.tables for group in _groups_of_table(table)]
    reports = {run: Report.load(run) for run in folders.runs}
    by_samples: dict[int | None, list[Path]] = {}
    for run, samples in _samples_by_run(reports).items():
        by_samples.setdefault(samples, []).append(run)
    groups = []
    for samples, runs in sorted(by_samples.items(), key=lambda entry: entry[0] or 0):
        summary = summarise(runs, folders.failed if len(by_samples) == 1 else ())
        for suite in summary.suites:
            chosen = {run: reports[run] for run in runs if reports[run].suite == suite}
            groups.append(Group(suite, samples, summary.displayed(suite), summary, chosen))
    suites = list(dict.fromkeys(report.suite for report in reports.values()))
    return sorted(groups, key=lambda group: suites.index(group.suite))


def _groups_of_table(folder: Path) -> list[Group]:
    summary = load_table(folder)
    return [
        Group(suite, None, summary.displayed(suite), summary, {}, folder.name)
        for suite in summary.suites
    ]


def _samples_by_run(reports: Mapping[Path, Report]) -> dict[Path, int | None]:
    """Samples per task that a run's rows were asked to draw.

    None for all runs of a suite that do not differ in it, and where a run has no such number or
    several.
    """
    numbers = {run: set(_sample_numbers(report.settings)) for run, report in reports.items()}
    of_suite: dict[str, set[int]] = {}
    for run, report in reports.items():
        of_suite.setdefault(report.suite, set()).update(numbers[run])
    samples: dict[Path, int | None] = {}
    for run, report in reports.items():
        tells = len(numbers[run]) == 1 and len(of_suite[report.suite]) > 1
        samples[run] = min(numbers[run]) if tells else None
    return samples


def _sample_numbers(content: Mapping[str, Any]) -> Iterator[int]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _sample_numbers(value)
        elif key == _SAMPLES and isinstance(value, int):
            yield value


def folders_of(groups: Sequence[Group]) -> list[Path]:
    """Folders of all runs."""
    return [run for group in groups for run in group.reports]


def files_in(folder: Path) -> list[Path]:
    """A folder's own files in order, without hidden ones."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file())
    return [path for path in files if not path.name.startswith(".")]


def addresses(files: Iterable[Path], place: Path, folder: Path | None = None) -> dict[str, str]:
    """Name (the path below `folder`, if there is one) -> address from a page in `place`."""
    return {
        path.relative_to(folder).as_posix() if folder else path.name: quote(
            Path(os.path.relpath(path.resolve(), place)).as_posix()
        )
        for path in files
    }


def labels(runs: Sequence[Path]) -> dict[Path, str]:
    """Names of runs: the parts of their paths that tell them apart."""
    if len(runs) < 2:
        return {run: run.name for run in runs}
    places = {run: run.resolve() for run in runs}
    shared = os.path.commonpath(places.values())
    return {run: place.relative_to(shared).as_posix() for run, place in places.items()}
