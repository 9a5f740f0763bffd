"""Results of a study: comparisons by their points' labels, as `study.json` and a long table."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.json_files import read_json

from .find import FailedCell
from .items import Interval, Scores, over_seeds, paired_difference, stacked
from .long_table import AVERAGE
from .report import Report
from .schema import SCHEMA, STUDY, STUDY_FILE, STUDY_KIND, check_types
from .summary import COMPARISON_SEED, Summary, SummaryRow, summarise

_SHORT = {"samples_per_task": "n"}


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
        return stacked(known, seeds)


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
    """

    name: str
    suite: str
    points: list[dict[str, Any]]
    seeds: list[int]
    over: list[str] = field(default_factory=list)
    design: str = "product"
    minutes: float | None = None
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

    @classmethod
    def load(cls, directory: str | Path) -> "Study":
        """Read `study.json`.

        Raises:
            ReportError: If it is damaged, of another kind or schema.
        """
        path = Path(directory) / STUDY_FILE
        content = read_json(path)
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


def label_text(labels: Mapping[str, Any]) -> str:
    """Labels of a point in words."""
    return ", ".join(f"{_SHORT.get(key, key)} = {value}" for key, value in labels.items())


def difference(
    one: tuple[Group, str | None, str], other: tuple[Group, str | None, str]
) -> Interval | None:
    """Accuracy of a row minus that of another, which may be of another point, and its interval.

    Both are those of the seeds that the two sides have in common, and the interval is that of
    `over_seeds`. None where a row is missing, or the sides have no seed in common.
    """
    first, second = (group.by_seed.get((merger, name), {}) for group, merger, name in (one, other))
    seeds = [seed for seed in first if seed in second]
    if not seeds:
        return None
    gains = [first[seed] - second[seed] for seed in seeds]
    mine, others = (group.scores(merger, name, seeds) for group, merger, name in (one, other))
    items = None
    if mine is not None and others is not None:
        with suppress(ReportError):  # other tasks or test items
            items = paired_difference(mine, others)
    return over_seeds(fmean(gains), gains, items)
