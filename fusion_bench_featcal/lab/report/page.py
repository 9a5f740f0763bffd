"""One self-contained HTML page of results: `featcal report RUN... --html FILE`."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fusion_bench_featcal.files import ReportError, prepare_directory, write_atomic
from fusion_bench_featcal.lab.report.columns import ACCURACY
from fusion_bench_featcal.lab.report.diagnosis import (
    diagnosis_grids,
    diagnosis_of,
    diagnosis_sentences,
)
from fusion_bench_featcal.lab.report.find import ResultFolders
from fusion_bench_featcal.lab.report.views import failures, legend, losses_of, suite_grids
from fusion_bench_featcal.results.long_table import (
    AVERAGE,
    FEATCAL,
    Line,
    merged_by,
)
from fusion_bench_featcal.results.report import Report
from fusion_bench_featcal.results.summary import Summary, SummaryRow
from fusion_bench_featcal.results.tables import (
    ABSENT,
    WORST,
    Grid,
    mapping_grid,
    short_names,
    without_codes,
)
from fusion_bench_featcal.results.views import note_lines

from .charts import svg
from .figures import figures_of
from .points import Point
from .points import figures as point_figures
from .points import grids as point_grids
from .points import sentences as point_sentences

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES = (".html", ".htm")
_MOST_CARDS = 12


@dataclass(frozen=True)
class Section:
    """A heading with sentences, figures and tables."""

    title: str
    grids: Mapping[str, Grid] = field(default_factory=dict)
    figures: "Mapping[str, Figure]" = field(default_factory=dict)
    lines: Sequence[str] = ()
    folded: bool = False


@dataclass(frozen=True)
class Card:
    """The gain of one row."""

    title: str
    subtitle: str
    number: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Page:
    """Content of a page: gains at the top, sections, and folders with the results' files."""

    title: str
    cards: Sequence[Card]
    sections: Sequence[Section]
    folders: Sequence[Path]


def check_target(path: Path, setting: str = "--html") -> Path:
    """Return the page's absolute path, after a check that its folder can be written.

    Raises:
        ReportError: If it is a folder, has another suffix, or its folder cannot be written.
    """
    if path.is_dir() or path.suffix.lower() not in _SUFFIXES:
        near = path / "report.html" if path.is_dir() else path.with_name(f"{path.name}.html")
        raise ReportError(f"{setting} names a file that ends in .html, such as {near}, not {path}")
    return prepare_directory(path.parent, setting) / path.name


def write_page(path: Path, page: Page, setting: str = "--html") -> Path:
    """Write a page atomically and return its path.

    Args:
        path: The file. Links to the results' files are relative to its folder.
        page: The content.
        setting: The setting that chose `path`, for messages.
    """
    path = check_target(path, setting)
    return write_atomic(path, page_text(page, path.parent.resolve()), setting)


def page_text(page: Page, folder: Path) -> str:
    """Return a page for a folder as one document. Values from users appear as plain text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"svg": svg, "full_heads": _full_heads}
    template = files(__package__ or "").joinpath("page.html").read_text(encoding="utf-8")
    sections = [
        replace(part, grids={name: grid for name, grid in part.grids.items() if grid.lines})
        for part in page.sections
    ]
    text = environment.from_string(template).render(
        title=page.title,
        cards=page.cards,
        sections=[part for part in sections if part.grids or part.figures or part.lines],
        links=_links(page.folders, folder),
    )
    return without_codes(text.strip()) + "\n"


def page_of_runs(folders: ResultFolders, summary: Summary) -> Page:
    """Return the page of runs and comparisons, averaged as on the terminal."""
    grids: dict[str, Grid] = {}
    for suite in summary.suites:
        grids |= {f"{suite}: {name}": grid for name, grid in suite_grids(summary, suite).items()}
        if losses := losses_of(summary, suite):
            grids[f"{suite}: loss"] = losses
    repairs = [row for row in summary.rows if row.is_repair]
    featcal = [row for row in repairs if row.name.startswith(FEATCAL)]
    reports = [Report.load(run) for run in summary.runs]
    diagnoses = {run: diagnosis_of(Path(run)) for run in summary.runs}
    return Page(
        ", ".join(dict.fromkeys(report.suite for report in reports)),
        [_card(row, summary) for row in (featcal or repairs)[:_MOST_CARDS]],
        [
            Section("Notes and warnings", lines=[*failures(summary.failed), *note_lines(summary)]),
            Section("Results", grids),
            Section("Figures", figures=figures_of(summary)),
            *(_diagnosis(Path(run), lines) for run, lines in diagnoses.items() if lines),
            *_origins(reports),
            Section("Meaning of the columns", lines=legend(summary), folded=True),
        ],
        [*folders.comparisons, *folders.runs],
    )


def page_of_points(folders: ResultFolders, points: Sequence[Point]) -> Page:
    """Return the page of runs or cells that differ in settings."""
    reports = [report for point in points for report in point.reports.values()]
    return Page(
        ", ".join(dict.fromkeys(report.suite for report in reports)),
        [],
        [
            Section("Notes", lines=point_sentences(points)),
            Section("Results", point_grids(points)),
            Section("Figures", figures=point_figures(points)),
            *_origins(reports),
        ],
        [*folders.cells, *folders.comparisons, *folders.runs],
    )


def _diagnosis(run: Path, lines: Sequence[Line]) -> Section:
    grids = diagnosis_grids(lines)
    return Section(f"Diagnosis in {run.name}", grids, lines=diagnosis_sentences(lines))


def _origins(reports: Sequence[Report]) -> list[Section]:
    return [
        Section("Data", _data(reports)),
        Section("Settings", {"settings": _settings(reports)}, folded=True),
        Section("Versions and device", {"versions": _versions(reports)}, folded=True),
    ]


def _full_heads(grid: Grid) -> list[tuple[str, Sequence[str]]]:
    """Return lines whose heads include the merger, because readers can sort them."""
    lines, merger = [], ""
    for head, cells in grid.lines:
        is_below = head.startswith("+ ")
        merger = merger if is_below else head
        lines.append((f"{merger} {head}" if is_below and merger else head, cells))
    return lines


def _card(row: SummaryRow, summary: Summary) -> Card:
    """Return the card of a FeatCal row: its gain in accuracy and the change of its loss."""
    cells = {column.head: column.cell(row) for column in ACCURACY}
    gain, _, limits = cells["gain over merger"].partition(" ")
    subtitle = f"{row.suite}, {merged_by(row.upstream)}"
    merger = (row.suite, row.upstream, row.upstream)
    merged = [r for r in summary.rows if (r.suite, r.upstream, r.name) == merger]
    before = "".join(f"{ACCURACY[0].cell(merged_row)} to " for merged_row in merged)
    unit = "points over the merged model" if gain != ABSENT else "no merged model to compare with"
    lines = [f"{unit} {limits}".strip(), f"average accuracy: {before}{cells[AVERAGE]} %"]
    if cells["recovered gap"] != ABSENT:
        lines.append(f"{cells['recovered gap']} of the gap to the experts recovered")
    task, share = (cells[column] for column in WORST)
    if row.worst:
        least = "smallest gain" if share == ABSENT else f"{share} of its gap"
        lines.append(f"worst task: {task}, {least}")
    losses = [
        merged_row.loss[AVERAGE] for merged_row in (*merged, row) if AVERAGE in merged_row.loss
    ]
    if losses:
        lines.append("average loss: " + " to ".join(f"{loss:.4f}" for loss in losses))
    return Card(row.name, subtitle, gain, lines)


def _settings(reports: Iterable[Report]) -> Grid:
    """Return settings by row. Values that differ between runs, such as seeds, share a cell."""
    values: dict[str, dict[str, dict[str, None]]] = {}
    for report in reports:
        for row, settings in report.settings.items():
            for key, value in settings.items():
                values.setdefault(row, {}).setdefault(key, {})[str(value)] = None
    joined = {row: {key: ", ".join(v) for key, v in of.items()} for row, of in values.items()}
    return mapping_grid(joined)


def _data(reports: Iterable[Report]) -> dict[str, Grid]:
    """Return samples of each row and test items, by suite and task."""
    counts: dict[str, dict[str, dict[str, dict[str, None]]]] = {}
    for report in reports:
        rows = counts.setdefault(report.suite, {})
        for row, tasks in report.samples.items():
            for task, entry in tasks.items():
                text = f"{entry['samples']} {entry['split']}"
                rows.setdefault(f"samples of {row}", {}).setdefault(task, {})[text] = None
        for task, entry in report.test_sets.items():
            items = str(entry.get("items", ABSENT))
            rows.setdefault("test items", {}).setdefault(task, {})[items] = None
    grids = {}
    for suite, rows in counts.items():
        names = short_names(list(dict.fromkeys(task for tasks in rows.values() for task in tasks)))
        lines = [
            (row, [", ".join(tasks.get(task, [ABSENT])) for task in names])
            for row, tasks in rows.items()
        ]
        if lines:
            grids[f"{suite}: samples and test items"] = Grid("", list(names.values()), lines)
    return grids


def _versions(reports: Iterable[Report]) -> Grid:
    """Return versions and devices, a column for each kind of run."""
    kinds: list[dict[str, Any]] = []
    for report in reports:
        kind = {**report.versions, **report.device}
        if kind not in kinds:
            kinds.append(kind)
    return mapping_grid({f"runs {number}": kind for number, kind in enumerate(kinds, start=1)})


def _links(folders: Iterable[Path], start: Path) -> dict[str, dict[str, str]]:
    """Return the addresses of the folders' files, relative to the folder of the page."""
    return {
        str(folder): {
            path.name: quote(Path(os.path.relpath(path.resolve(), start)).as_posix())
            for path in sorted(folder.iterdir())
            if path.is_file() and not path.name.startswith(".")
        }
        for folder in folders
    }
