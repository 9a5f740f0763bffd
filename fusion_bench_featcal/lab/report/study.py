"""Results of a study: comparisons at several points, distinguished by labels."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, prepare_directory
from fusion_bench_featcal.json_files import plain, read_json
from fusion_bench_featcal.lab.report.columns import ACCURACY, COSTS
from fusion_bench_featcal.lab.report.views import failures, task_grid
from fusion_bench_featcal.results.columns import with_values
from fusion_bench_featcal.results.intervals import LEVEL, VALUES, Interval, student_interval
from fusion_bench_featcal.results.long_table import (
    AVERAGE,
    BASE,
    COMPARISON_SEED,
    EXPERTS,
    LINES_FILE,
    RowKey,
    write_lines,
)
from fusion_bench_featcal.results.notes import BELOW, FAILED, chosen
from fusion_bench_featcal.results.report import Report
from fusion_bench_featcal.results.report_files import REPORT_FILE, addresses, write_files
from fusion_bench_featcal.results.schema import SCHEMA, STUDY, STUDY_KIND, check_types
from fusion_bench_featcal.results.summary import FailedCell, Summary, SummaryRow, summarise_reports
from fusion_bench_featcal.results.tables import (
    ABSENT,
    Grid,
    console,
    page,
    print_page,
    titled,
)
from fusion_bench_featcal.results.views import meanings, note_lines, spread_meaning

from . import charts
from .differences import INTERVAL_COLUMNS, Difference, differences

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AVERAGE_HEAD = "average accuracy, % (gap recovered on the worst task)"


class Point(NamedTuple):
    """A point: its labels, and a summary for each value of the labels to average over."""

    labels: dict[str, Any]
    summaries: list[Summary]
    averaged: list[dict[str, Any]]  # for each summary, the labels to average over

    def rows(self, merger: str, name: str) -> list[SummaryRow]:
        """Return the rows with a name."""
        rows = (row for summary in self.summaries for row in summary.rows)
        return [row for row in rows if (row.upstream, row.name) == (merger, name)]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs of a study and the settings of its presentation.

    Attributes:
        name: Name of the study, such as `samples`.
        suite: Model pool.
        runs: Folders of the points' runs. Their reports have the labels.
        failed: Cells without a result.
        over: Labels to average over, in addition to seeds.
        against: Row -> rows compared with it, if the study has one point.
        columns: Columns of a comparison that get a table by point, in addition to the average.
    """

    name: str
    suite: str
    runs: list[Path]
    failed: list[FailedCell] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    against: Mapping[str, list[str]] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)

    @cached_property
    def reports(self) -> dict[Path, Report]:
        """Reports of the runs, read once."""
        return {run: Report.load(run) for run in self.runs}

    @cached_property
    def points(self) -> list[Point]:
        """The points, each averaged over its seeds.

        Raises:
            ReportError: If there is no run, a report is damaged, or runs contradict one another.
        """
        if not self.runs:
            reasons = list(dict.fromkeys(cell.reason for cell in self.failed))
            raise ReportError(f"no point of the study gave a result: {'; '.join(reasons[:3])}")
        groups: dict[tuple[Any, ...], dict[Path, Report]] = {}
        for run, report in self.reports.items():
            groups.setdefault(tuple(report.labels.items()), {})[run] = report
        points: dict[tuple[Any, ...], Point] = {}
        for key, reports in groups.items():
            labels = dict(key)
            displayed_labels = {key: value for key, value in labels.items() if key not in self.over}
            point = points.setdefault(
                tuple(displayed_labels.items()), Point(displayed_labels, [], [])
            )
            point.summaries.append(summarise_reports(reports))
            point.averaged.append({key: labels[key] for key in self.over if key in labels})
        return list(points.values())

    def write(self, directory: str | Path, setting: str = LOG_DIR_SETTING) -> Path:
        """Write the long table `lines.csv`, `report.md` and, last, `report.json`.

        Raises:
            ReportError: If the folder cannot be written, or there is no result.
        """
        points, reports = self.points, list(self.reports.values())
        folder = prepare_directory(directory, setting)
        content = asdict(self) | {"runs": addresses(self.runs, folder)}
        lines = [line for report in reports for line in report.lines()]
        about = {
            "seeds": list(dict.fromkeys(report.seeds.get(COMPARISON_SEED) for report in reports)),
            "versions": reports[0].versions,
            "device": reports[0].device,
            "points": [
                {"labels": point.labels | labels, "rows": self._stored(summary)}
                for point in points
                for summary, labels in zip(point.summaries, point.averaged, strict=True)
            ],
        }
        write_lines(folder / LINES_FILE, lines, setting)
        content = {"kind": STUDY_KIND, "schema": SCHEMA, **content, **plain(about, "study")}
        return write_files(folder, content, self._markdown(), setting)

    @classmethod
    def load(cls, directory: str | Path) -> "Study":
        """Read the `report.json` of a study.

        Raises:
            ReportError: If it is missing or damaged.
        """
        path = Path(directory) / REPORT_FILE
        content = read_json(path)
        check_types(content, STUDY, str(path))
        if content.get("schema") != SCHEMA:
            raise ReportError(f"{path} has schema {content.get('schema')!r}: run the study again")
        failed = [FailedCell(**cell) for cell in content["failed"]]
        runs = [path.parent / run for run in content["runs"]]
        names = ("name", "suite", "over", "against", "columns")
        return cls(**{name: content[name] for name in names}, failed=failed, runs=runs)

    def show(self) -> None:
        """Print tables and sentences to stdout."""
        width = console().width
        tables = [
            table
            for title, grid in self.grids()
            for table in titled(f"{self.suite}, {self.name}: {title}", grid.fitting(width))
        ]
        print_page(tables, self.sentences())

    def grids(self) -> list[tuple[str, Grid]]:
        """Return titles and tables: for each merger the average, then the other columns."""
        points = self.points
        grids = []
        for merger in mergers_of(points):
            if len(points) == 1 and len(points[0].summaries) == 1:
                grids.append((f"over {merger}", self._rows_grid(points[0].summaries[0], merger)))
                continue
            grids.append((f"{AVERAGE_HEAD}, over {merger}", _points_grid(points, merger)))
            for column in self.columns:
                grid = _points_grid(points, merger, column)
                if any(cell != ABSENT for _, cells in grid.lines for cell in cells):
                    grids.append((f"{column}, over {merger}", grid))
        return grids

    def figures(self) -> "dict[str, Figure]":
        """Return a figure for each merger: curves along numeric axes, else dots by point."""
        points, title = self.points, f"{self.suite}, {self.name}"
        figures = {}
        for merger in mergers_of(points):
            over, label = f"{title}, over {merger}", "average accuracy, %"
            if curves := curves_of(points, merger):
                figure = charts.curves(curves, "", label, title=over, sharex=False)
            else:
                figure = charts.dots({"": _dots_of(points, merger)}, label, title=over)
            figures[f"{self.name}_{merger}"] = figure
        return figures

    def sentences(self) -> list[str]:
        """Return the meaning of the numbers, failed cells and the runs' notes."""
        points = self.points
        over = " and ".join(self.over)
        summaries = [summary for point in points for summary in point.summaries]
        if len(summaries) == 1:
            summary = replace(summaries[0], failed=self.failed)
            return [
                *failures(self.failed),
                *meanings(summary, _ROW_COLUMNS),
                *[_DIFFERENCE_MEANING] * bool(self.against),
                *_fewer_samples(points),
                *(f"note: {note}" for note in note_lines(summary)),
            ]
        rows = [row for summary in summaries for row in summary.rows]
        displayed_columns = with_values(
            [c for c in (*ACCURACY, *COSTS) if c.head in self.columns], rows
        )
        meaning = "accuracy in per cent"
        if over:
            meaning += f", mean over {over}, ± half of the {100 * LEVEL:.0f} % interval over "
            meaning += f"{over} (Student's t, as if these did not overlap)"
        else:
            meaning += spread_meaning(rows)
        # Each point's report names the tasks that end below the merged model.
        kinds = (BELOW, FAILED) if self.failed else (BELOW,)
        notes = chosen(
            dict.fromkeys(note for summary in summaries for note in summary.notes), *kinds
        )
        return [
            *failures(self.failed),
            meaning,
            *(column.meaning for column in displayed_columns if column.meaning),
            *_fewer_samples(points),
            *(f"note: {note.sentence_of_several}" for note in notes),
        ]

    def _markdown(self) -> str:
        paragraphs: list[str | Sequence[str]] = []
        for title, grid in self.grids():
            paragraphs += [f"## {title[0].upper()}{title[1:]}", grid.for_page().markdown()]
        for point in self.points if not self.over else ():
            rows = point.summaries[0].displayed(point.summaries[0].suites[0])
            paragraphs += [f"### Accuracy per task, {label_text(point.labels) or 'all rows'}"]
            paragraphs += [task_grid(rows).for_page().markdown()]
        return page(f"# {self.suite}: {self.name}", *paragraphs, "## Notes", self.sentences())

    def _stored(self, summary: Summary) -> list[dict[str, Any]]:
        """Return the rows of a point in the form of `report.json`."""
        compared = self._differences(summary)
        rows = []
        for row in summary.rows:
            difference = compared.get((row.suite, row.upstream, row.name))
            numbers = (int, float)
            rows.append(
                {
                    **{key: getattr(row, key) for key in _STORED},
                    "half_width": row.average.half,
                    "against": difference.other[2] if difference else row.upstream,
                    "difference": difference.interval if difference else row.gain_interval,
                    "cost": {key: n for key, n in row.cost.items() if isinstance(n, numbers)},
                }
            )
        return rows

    @property
    def _changed(self) -> dict[str, str]:
        """Row -> the row that it changes and is compared with."""
        return {row: name for name, rows in self.against.items() for row in rows}

    def _differences(self, summary: Summary) -> dict[RowKey, Difference]:
        """Return differences of rows from the rows they change, if test items are known."""
        scores, changed = summary.scores, self._changed
        pairs = {key: (*key[:2], changed[key[2]]) for key in scores if key[2] in changed}
        with_scores = [(key, other) for key, other in pairs.items() if other in scores]
        return {difference.row: difference for difference in differences(scores, with_scores)}

    def _rows_grid(self, summary: Summary, merger: str) -> Grid:
        """Return rows of the only point, with differences from the rows they change."""
        suite, changed_rows, compared = summary.suites[0], self._changed, self._differences(summary)
        lines = []
        for row in summary.displayed(suite):
            if row.upstream != merger and not row.is_reference:
                continue
            chosen = [column.cell(row) for column in _ROW_COLUMNS]
            change = compared.get((suite, merger, row.name))
            difference = change.cells if change else [ABSENT] * len(INTERVAL_COLUMNS)
            other = changed_rows.get(row.name, ABSENT)
            lines.append((row.name, [*chosen, other, *difference]))
        heads = [column.head for column in _ROW_COLUMNS]
        return Grid("", [*heads, "against", *INTERVAL_COLUMNS], lines)


_STORED = (
    "upstream", "name", "accuracy", "gain", "recovered_gap", "worst_task", "worst_recovered_gap",
    "samples",
)  # fmt: skip
_ROW_HEADS = (AVERAGE, "gain over merger", "worst task", "its gap")
_ROW_COLUMNS = [column for column in ACCURACY if column.head in _ROW_HEADS]
_DIFFERENCE_MEANING = (
    "points: average accuracy minus that of the row in the column against, with an interval as for "
    "the gain and p-values with Holm's correction over these rows"
)
_CELLS = {column.head: column.cell for column in (*ACCURACY, *COSTS)}


def mergers_of(points: Sequence[Point]) -> list[str]:
    """Return the upstream mergers, in order."""
    rows = (row for point in points for summary in point.summaries for row in summary.rows)
    return list(dict.fromkeys(row.upstream for row in rows if row.upstream is not None))


def names_of(points: Sequence[Point], merger: str) -> list[str]:
    """Return the names of a merger's rows without the base, experts last."""
    rows = (row for point in points for summary in point.summaries for row in summary.rows)
    names = dict.fromkeys(row.name for row in rows if row.upstream == merger)
    return sorted((name for name in names if name != BASE), key=lambda name: name == EXPERTS)


def label_text(labels: Mapping[str, Any]) -> str:
    """Return the labels of a point as text, such as `n = 8`."""
    return ", ".join(
        f"{'n' if key == 'samples_per_task' else key} = {value}" for key, value in labels.items()
    )


def average_of(rows: Sequence[SummaryRow]) -> Interval:
    """Return the mean accuracy with its interval.

    Args:
        rows: A row at one point, for each value of the labels to average over. With one value the
            interval is over seeds, with several it is over these values.
    """
    if len(rows) > 1:
        return student_interval([row.accuracy[AVERAGE] for row in rows], VALUES)
    return rows[0].average


def curves_of(points: Sequence[Point], merger: str) -> dict[str, dict[str, dict[float, Interval]]]:
    """Return accuracy in per cent along each numeric axis, in the form for `charts.curves`.

    For all other axes the labels of the first point are used.
    """
    curves: dict[str, dict[str, dict[float, Interval]]] = {}
    for axis in points[0].labels:
        other_labels = {key: value for key, value in points[0].labels.items() if key != axis}
        line = [point for point in points if other_labels.items() <= point.labels.items()]
        if len(line) < 2 or not all(isinstance(p.labels[axis], int | float) for p in line):
            continue
        for point in sorted(line, key=lambda point: point.labels[axis]):
            for name, value in _estimates(point, merger).items():
                curve = curves.setdefault(axis, {}).setdefault(name, {})
                curve[point.labels[axis]] = value
    return curves


def _dots_of(points: Sequence[Point], merger: str) -> dict[str, dict[str, Interval]]:
    rows: dict[str, dict[str, Interval]] = {}
    for point in points:
        for name, estimate in _estimates(point, merger).items():
            rows.setdefault(name, {})[label_text(point.labels) or name] = estimate
    return rows


def _estimates(point: Point, merger: str) -> dict[str, Interval]:
    """Return the accuracy of each row in per cent, with its interval. The merger is `merged`."""
    return {
        charts.MERGED if name == merger else name: average_of(point.rows(merger, name)).scaled(100)
        for name in names_of([point], merger)
    }


def _points_grid(points: Sequence[Point], merger: str, column: str = "") -> Grid:
    """Return a table of rows by points. Without a column it shows averages."""
    lines = [
        (
            name if name in (merger, EXPERTS) else f"+ {name}",
            [_cell(point.rows(merger, name), column) for point in points],
        )
        for name in names_of(points, merger)
    ]
    grid = Grid("", [label_text(point.labels) for point in points], lines)
    return grid if len(points) < min(10, len(lines) + 4) else grid.transposed()


def _cell(rows: Sequence[SummaryRow], column: str) -> str:
    if not rows:
        return ABSENT
    if column:
        return _CELLS[column](rows[0]) if len(rows) == 1 else ABSENT
    shares = [row.worst_recovered_gap for row in rows if row.worst_recovered_gap is not None]
    return average_of(rows).text() + (f" ({100 * min(shares):.0f} %)" if shares else "")


def _fewer_samples(points: Sequence[Point]) -> list[str]:
    """Return a sentence for each number of samples that exceeds some tasks' data."""
    lines: dict[str, None] = {}
    for point in points:
        number = point.labels.get("samples_per_task")
        for row in (row for summary in point.summaries for row in summary.rows):
            if isinstance(number, int) and row.samples and int(row.samples.split()[0]) < number:
                lines[f"n = {number}: tasks with fewer samples give all of them"] = None
    return list(lines)
