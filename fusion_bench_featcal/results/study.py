"""Results of a study: comparisons by their points' labels, as `study.json` and a long table."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, prepare_directory, write_atomic
from fusion_bench_featcal.json_files import plain, read_json, sealed_json

from .find import FailedCell
from .items import Interval, Scores, paired_difference, student_interval
from .long_table import AVERAGE, CORRECT
from .report import Report, csv_text
from .schema import SCHEMA, STUDY, STUDY_FILE, STUDY_KIND, check_types
from .summary import COMPARISON_SEED, Summary, SummaryRow, summarise

TABLE_FILE, PAGE_FILE = "table.csv", "study.md"
_UNDRAWN = "not all figures were drawn"
_SHORT = {"samples_per_task": "n"}
_KEPT = (
    "upstream", "name", "accuracy", "gain", "recovered_gap", "worst_task", "worst_recovered_gap",
    "samples", "spread",
)  # fmt: skip


@dataclass
class Group:
    """Runs at one point, of all its seeds.

    Attributes:
        labels: Labels of the point, without the seed.
        runs: Folders with the report of one merger and seed each.
        failed: Cells that gave no result.
    """

    labels: dict[str, Any]
    runs: list[Path] = field(default_factory=list)
    failed: list[FailedCell] = field(default_factory=list)
    summary: Summary | None = None
    by_seed: dict[tuple[str | None, str], dict[int, float]] = field(default_factory=dict)
    flags: dict[tuple[str | None, str], dict[int, Scores]] = field(default_factory=dict)

    def add(self, runs: Sequence[Path], failed: Sequence[FailedCell]) -> None:
        """Add what one seed gave."""
        self.runs += runs
        self.failed += failed

    def load(self) -> None:
        """Read the runs' reports, and average them over seeds."""
        if not self.runs:
            return
        self.summary = summarise(self.runs, self.failed)
        for report in map(Report.load, self.runs):
            seed = report.seeds.get(COMPARISON_SEED) or 0
            for name, row in report.rows.items():
                key = report.upstream, name
                self.by_seed.setdefault(key, {})[seed] = row[AVERAGE]
                if set(report.items.get(name, ())) == set(row) - {AVERAGE}:
                    self.flags.setdefault(key, {})[seed] = report.items[name]

    def row(self, merger: str | None, name: str) -> SummaryRow | None:
        """The row of a name on a merger."""
        rows = self.summary.rows if self.summary else []
        return next((row for row in rows if (row.upstream, row.name) == (merger, name)), None)

    def scores(self, merger: str | None, name: str, seeds: Sequence[int]) -> Scores | None:
        """Flags of a row, task -> `[seeds, items]`; None where a seed has none."""
        known = self.flags.get((merger, name), {})
        if not set(seeds) <= set(known):
            return None
        return {task: np.stack([known[seed][task] for seed in seeds]) for task in known[seeds[0]]}


@dataclass(kw_only=True)
class Study:
    """A study's results.

    Attributes:
        name: Its name, such as `samples`.
        suite: Model pool.
        points: By point: its labels, rows and failed cells, averaged over seeds.
        seeds: All seeds.
        over: Labels that are averaged over, as seeds are.
        design: `product` of the axes, or `each` axis around the present settings.
        minutes: Of the last pass, without cells that earlier ones had finished.
        findings: Sentences on the paper's observations, made by `results.observations`.
    """

    name: str
    suite: str
    points: list[dict[str, Any]]
    seeds: list[int]
    over: list[str] = field(default_factory=list)
    design: str = "product"
    minutes: float | None = None
    findings: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list, repr=False)  # of the long table

    @property
    def labels(self) -> list[str]:
        """Names of the points' labels."""
        return list(dict.fromkeys(name for point in self.points for name in point["labels"]))

    @property
    def mergers(self) -> list[str]:
        """Upstream mergers, in the order of the points."""
        rows = (row for point in self.points for row in point["rows"])
        return list(dict.fromkeys(row["upstream"] for row in rows))

    def names(self, merger: str) -> list[str]:
        """Names of a merger's rows."""
        rows = (row for point in self.points for row in point["rows"])
        return list(dict.fromkeys(row["name"] for row in rows if row["upstream"] == merger))

    def write(self, directory: str | Path, setting: str = LOG_DIR_SETTING) -> Path:
        """Write figures, table, page and, last, `study.json`; return the last one's path.

        Raises:
            ReportError: If the folder cannot be written.
        """
        from .study_page import study_markdown

        directory = prepare_directory(directory, setting)
        self._draw(directory, setting)
        if self.lines:
            text = csv_text(self.lines[0], self.lines)
            write_atomic(directory / TABLE_FILE, text, setting)
        write_atomic(directory / PAGE_FILE, study_markdown(self), setting)
        content = {"kind": STUDY_KIND, "schema": SCHEMA, **plain(asdict(self), "study")}
        del content["lines"]
        return write_atomic(directory / STUDY_FILE, sealed_json(content), setting)

    def _draw(self, directory: Path, setting: str) -> None:
        """Draw the figures; a note tells of what prevents it."""
        from .study_figures import draw_study

        self.notes = [note for note in self.notes if not note.startswith(_UNDRAWN)]
        try:
            draw_study(self, directory, setting)
        except Exception as error:  # hours of cells reach the tables whatever a drawing raises
            reason = error if isinstance(error, ReportError) else repr(error)
            self.notes.append(f"{_UNDRAWN}: {reason}")

    @classmethod
    def load(cls, directory: str | Path) -> "Study":
        """Read `study.json`.

        Raises:
            ReportError: If it is damaged, of another kind or schema.
        """
        path = Path(directory) / STUDY_FILE
        content = read_json(path, sealed=True)
        if not isinstance(content, dict) or content.get("kind") != STUDY_KIND:
            raise ReportError(f'{path} is not a study (no "kind": "{STUDY_KIND}")')
        if content.get("schema") != SCHEMA:
            raise ReportError(
                f"{path} has schema {content.get('schema')!r}; this version of "
                f"fusion_bench_featcal reads schema {SCHEMA}. Run the study again."
            )
        check_types(content, STUDY, str(path))
        names = set(cls.__dataclass_fields__) - {"lines"}
        return cls(**{key: value for key, value in content.items() if key in names})


def make_study(
    name: str,
    suite: str,
    groups: Sequence[Group],
    *,
    seeds: list[int],
    over: list[str],
    against: Mapping[str, Sequence[str]] | None,
    design: str,
) -> Study:
    """Average every point over its seeds, and see which of the paper's observations hold.

    Args:
        name: The study's name.
        suite: The model pool.
        groups: The points' runs.
        seeds: All seeds.
        over: Labels that are averaged over.
        against: Row -> rows whose difference from it is of interest; others: from their merger.
        design: As in `Study`.

    Raises:
        ReportError: If no point gave any result.
    """
    from .observations import find_out

    for group in groups:
        group.load()
    if not any(group.runs for group in groups):
        reasons = list(dict.fromkeys(cell.reason for g in groups for cell in g.failed))
        raise ReportError(f"no point of the study gave a result: {'; '.join(reasons[:3])}")
    study = Study(
        name=name,
        suite=suite,
        points=[_point(group, against or {}) for group in groups],
        seeds=seeds,
        over=over,
        design=design,
        lines=[line for group in groups for line in _lines(name, suite, group)],
    )
    if len(seeds) == 1:
        study.notes.append(
            f"one seed ({seeds[0]}): intervals are over test items alone; for others set "
            "method.seeds=[42,43,44]"
        )
    notes = (note for g in groups if g.summary for note in g.summary.notes)
    # Of tasks below the merged model every point's report tells.
    study.notes += [note for note in dict.fromkeys(notes) if "below the merged" not in note]
    study.findings = [asdict(finding) for finding in find_out(study, groups)]
    return study


def label_text(labels: Mapping[str, Any]) -> str:
    """Labels of a point in words."""
    return ", ".join(f"{_SHORT.get(key, key)} = {value}" for key, value in labels.items())


def seed_half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean over draws, by Student's t; 0 for one."""
    interval = student_interval(values)
    return interval.high - interval.estimate


def difference(
    one: tuple[Group, str | None, str], other: tuple[Group, str | None, str]
) -> Interval | None:
    """Accuracy of a row minus that of another, which may be of another point, and its interval.

    Both are those of the seeds that the two sides have in common. The interval's half-width is the
    root of the sum of squares of two: over test items (paired bootstrap, given the seeds), and over
    seeds (Student's t). None where a row is missing, or the sides have no seed in common.
    """
    first, second = (group.by_seed.get((merger, name), {}) for group, merger, name in (one, other))
    seeds = [seed for seed in first if seed in second]
    if not seeds:
        return None
    gains = [first[seed] - second[seed] for seed in seeds]
    estimate, half = fmean(gains), seed_half_width(gains)
    mine, others = (group.scores(merger, name, seeds) for group, merger, name in (one, other))
    if mine is None or others is None:
        return Interval(estimate, estimate - half, estimate + half)
    try:
        items = paired_difference(mine, others)
    except ReportError:  # other tasks or test items
        return Interval(estimate, estimate - half, estimate + half)
    low, high = items.estimate - items.low, items.high - items.estimate
    return Interval(estimate, estimate - math.hypot(low, half), estimate + math.hypot(high, half))


def _point(group: Group, against: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    rows = []
    compared = {row: name for name, names in against.items() for row in names}
    for row in group.summary.rows if group.summary else ():
        own = (group, row.upstream, row.name)
        values = group.by_seed[row.upstream, row.name]
        other = compared.get(row.name, row.upstream)
        gain = None if row.upstream is None else difference(own, (group, row.upstream, other or ""))
        cost = {key: value for key, value in row.cost.items() if isinstance(value, int | float)}
        rows.append(
            {
                **{key: getattr(row, key) for key in _KEPT},
                "seeds": len(values),
                "half_width": seed_half_width([*values.values()]),
                "against": other,
                "difference": gain and asdict(gain),
                "cost": cost,
            }
        )
    failed = [asdict(cell) for cell in group.failed]
    return {"labels": group.labels, "rows": rows, "failed": failed}


def _lines(study: str, suite: str, group: Group) -> Iterator[dict[str, Any]]:
    """The group's part of the long table."""
    for path in group.runs:
        report = Report.load(path)
        seed = report.seeds.get(COMPARISON_SEED)
        for entry in report.entries():
            if entry.metric == CORRECT or not isinstance(entry.value, int | float):
                continue
            place = {"study": study, "suite": suite, **group.labels}
            yield place | {
                "merger": entry.merger, "row": entry.row, "task": entry.task, "seed": seed,
                "metric": entry.metric, "value": f"{entry.value:.6g}",
            }  # fmt: skip
