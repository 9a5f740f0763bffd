"""Rows at several points: runs or cells that differ in settings, such as the number of samples."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fusion_bench_featcal.files import LOG_DIR_SETTING, prepare_directory, write_atomic
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results import BASE, EXPERTS, LINES_FILE, Report, write_lines
from fusion_bench_featcal.results.cells import CellResult
from fusion_bench_featcal.results.intervals import Interval
from fusion_bench_featcal.results.long_table import COMPARISON_SEED
from fusion_bench_featcal.results.notes import BELOW, NOTE, Note, chosen
from fusion_bench_featcal.results.summary import Summary, SummaryRow, summarise_reports
from fusion_bench_featcal.results.tables import ABSENT, Grid, console, page, print_page, titled
from fusion_bench_featcal.results.views import spread_meaning

from . import charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

Labels = dict[str, Any]
MEANING = "average accuracy in per cent and, in parentheses, the gap recovered on the worst task"
_WIDEST = 9  # most points that are columns


class Point(NamedTuple):
    """Values of the settings that differ, and the averaged rows of the runs that have them."""

    labels: Labels
    reports: Mapping[Path, Report]
    summary: Summary

    def row(self, merger: str, name: str) -> SummaryRow | None:
        """Return a row, or None if the point lacks it."""
        rows = (row for row in self.summary.rows if (row.upstream, row.name) == (merger, name))
        return next(rows, None)


def report_of(cells: Iterable[CellResult], merger: str, seed: int | None) -> Report:
    """Return cells of one upstream merger, and references, as the report of a run."""
    cells = list(cells)
    report = Report(
        suite=cells[0].suite,
        upstream=merger,
        versions=cells[-1].versions,
        device=cells[-1].device,
        seeds={} if seed is None else {COMPARISON_SEED: seed},
    )
    for cell in cells:
        report.add_row(
            cell.row,
            cell.accuracy,
            settings=cell.settings or None,
            cost=cell.cost or None,
            samples=cell.samples or None,
            correct=cell.correct,
            loss=cell.loss,
        )
        if cell.seed is not None:
            report.seeds[cell.row] = cell.seed
        report.note(*(Note(NOTE, text, cell.row) for text in cell.notes))
    return report


def points_of_cells(cells: Sequence[CellResult]) -> list[Point]:
    """Return the points of a comparison's cells.

    A cell without a setting belongs to all its values. If cells differ only in pools, versions or
    the source of a class, the last one counts, with a warning.
    """
    values = [cell.conditions | cell.settings for cell in cells]
    differing = _differing(
        (cell.suite, cell.merger, cell.row, settings)
        for cell, settings in zip(cells, values, strict=True)
    )
    latest: dict[str, tuple[Labels, CellResult]] = {}
    for cell, settings in zip(cells, values, strict=True):
        labels = {key: _as_label(settings[key]) for key in differing if key in settings}
        position = [cell.suite, cell.merger, cell.row, cell.seed, labels]
        latest[json.dumps(position)] = labels, cell
    entries = list(latest.values())
    if older := len(cells) - len(entries):
        log.warning(
            "%s left out: newer cells of the same rows and settings differ in pools, versions or "
            "code",
            counted(older, "cell"),
        )
    points = []
    for labels in _largest(labels for labels, _ in entries):
        at_point = [cell for at, cell in entries if at.items() <= labels.items()]
        reports = {}
        for suite, merger in dict.fromkeys((c.suite, c.merger) for c in at_point if c.merger):
            of_merger = [c for c in at_point if c.suite == suite and c.merger in ("", merger)]
            for seed in {c.seed for c in of_merger} - {None} or {None}:
                rows = [cell for cell in of_merger if cell.seed in (None, seed)]
                reports[Path(f"{merger}, seed {seed}")] = report_of(rows, merger, seed)
        points.append(_point(labels, reports))
    return sorted(points, key=_order)


def points_of_runs(reports: Mapping[Path, Report]) -> list[Point]:
    """Return the points of runs, which are one point if no setting but the seed differs."""
    rows = [
        (report.suite, report.upstream, row, settings)
        for report in reports.values()
        for row, settings in report.settings.items()
    ]
    differing, groups = _differing(rows), dict[str, tuple[Labels, dict[Path, Report]]]()
    for path, report in reports.items():
        labels = {
            key: _as_label(settings[key])
            for settings in report.settings.values()
            for key in differing
            if key in settings
        }
        groups.setdefault(json.dumps(labels, sort_keys=True), (labels, {}))[1][path] = report
    return sorted((_point(*group) for group in groups.values()), key=_order)


def _point(labels: Labels, reports: Mapping[Path, Report]) -> Point:
    for report in reports.values():
        report.labels = dict(labels)
    return Point(labels, reports, summarise_reports(reports))


def _differing(rows: Iterable[tuple[Any, Any, Any, Mapping[str, Any]]]) -> list[str]:
    """Return settings with several values for one row, without seeds."""
    values: dict[tuple[Any, ...], dict[str, None]] = {}
    for suite, merger, row, settings in rows:
        for key, value in settings.items():
            position = (suite, merger, row, key)
            values.setdefault(position, {})[json.dumps(_as_label(value), sort_keys=True)] = None
    keys = (position[3] for position, several in values.items() if len(several) > 1)
    return [key for key in dict.fromkeys(keys) if key != "seed"]


def _as_label(value: Any) -> Any:
    """Return a setting's value as a number or text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        if isinstance(value, Mapping):
            return " ".join(str(_as_label(part)) for part in value.values())
        return json.dumps(value, default=str)
    return value


def _largest(labels: Iterable[Labels]) -> list[Labels]:
    """Return labels that are not part of others."""
    distinct = list({json.dumps(one, sort_keys=True): one for one in labels}.values())
    return [one for one in distinct if not any(one.items() < other.items() for other in distinct)]


def _order(point: Point) -> list[Any]:
    return [(isinstance(value, str), value) for value in point.labels.values()]


# ---- views


def show(points: Sequence[Point]) -> None:
    """Print a table for each upstream merger: rows by points."""
    width = console().width
    tables = [
        table for title, grid in grids(points).items() for table in titled(title, grid.split(width))
    ]
    print_page(tables, sentences(points))


def write(points: Sequence[Point], directory: str | Path, setting: str = LOG_DIR_SETTING) -> Path:
    """Write the long table `lines.csv` and `report.md`. Return the path of the last one."""
    folder = prepare_directory(directory, setting)
    lines = [line for point in points for r in point.reports.values() for line in r.lines()]
    keys = dict.fromkeys(key for line in lines for key in line)
    lines = [{key: line.get(key, "") for key in keys} for line in lines]
    write_lines(folder / LINES_FILE, lines, setting)
    paragraphs: list[Any] = []
    for title, grid in grids(points).items():
        paragraphs += [f"## {title}", grid.for_page().markdown()]
    text = page("# Report of several points", *paragraphs, "## Notes", sentences(points))
    return write_atomic(folder / "report.md", text, setting)


def grids(points: Sequence[Point]) -> dict[str, Grid]:
    """Return rows by points, or points by rows if there are many points, for each merger."""
    tables = {}
    for suite, merger in _mergers(points):
        lines = [
            (
                name if name in (merger, EXPERTS) else f"+ {name}",
                [_cell(point.row(merger, name)) for point in points],
            )
            for name in _names(points, merger)
        ]
        grid = Grid("", [label_text(point.labels) for point in points], lines)
        tables[f"{suite}, {merger}"] = grid if len(points) < _WIDEST else grid.transposed()
    return tables


def figures(points: Sequence[Point]) -> "dict[str, Figure]":
    """Return a figure along each setting with several numbers: accuracy of each row."""
    charts_by_name = {}
    for _, merger in _mergers(points):
        for key in points[0].labels:
            first = {k: v for k, v in points[0].labels.items() if k != key}
            line = [point for point in points if first.items() <= point.labels.items()]
            values = [point.labels[key] for point in line]
            if len(line) < 2 or not all(isinstance(value, int | float) for value in values):
                continue
            curves: dict[str, dict[float, Interval]] = {}
            for name in _names(line, merger):
                label = charts.MERGED if name == merger else name
                for point in sorted(line, key=lambda point: point.labels[key]):
                    if row := point.row(merger, name):
                        interval = row.average.scaled(100)
                        curves.setdefault(label, {})[point.labels[key]] = interval
            title = f"Average accuracy by {key}, over {merger}"
            charts_by_name[f"{merger}-{key}"] = charts.curves(
                {key: curves}, key, "accuracy, %", title=title
            )
    return charts_by_name


def sentences(points: Sequence[Point]) -> list[str]:
    """Return the meaning of the numbers, and the notes of all points but one on each task."""
    rows = [row for point in points for row in point.summary.rows]
    notes = dict.fromkeys(note for point in points for note in point.summary.notes)
    texts = [note.sentence_of_several for note in chosen(notes, BELOW)]
    return [f"{MEANING}{spread_meaning(rows)}", *(f"note: {text}" for text in texts)]


def label_text(labels: Mapping[str, Any]) -> str:
    """Return the labels of a point as text, such as `n = 8`."""
    return ", ".join(
        f"{'n' if key == 'samples_per_task' else key} = {value}" for key, value in labels.items()
    )


def _mergers(points: Sequence[Point]) -> list[tuple[str, str]]:
    rows = (row for point in points for row in point.summary.rows)
    return list(dict.fromkeys((row.suite, row.upstream) for row in rows if row.upstream))


def _names(points: Sequence[Point], merger: str) -> list[str]:
    """Return the names of a merger's rows without the base, experts last."""
    rows = (row for point in points for row in point.summary.rows)
    names = dict.fromkeys(row.name for row in rows if row.upstream == merger)
    return sorted((name for name in names if name != BASE), key=lambda name: name == EXPERTS)


def _cell(row: SummaryRow | None) -> str:
    if row is None:
        return ABSENT
    share = row.worst_recovered_gap
    return row.average.text() + ("" if share is None else f" ({100 * share:.0f} %)")
