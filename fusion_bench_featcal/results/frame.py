"""The frame of results: a line for each model over its seeds. Every view shows this frame."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from fusion_bench_featcal.errors import ReportError

from .columns import AVERAGE, COST, ROW_COLUMNS, setting_column, value_column
from .joining import SAMPLES, Results, as_key, grouped, join, label
from .names import (
    ACCURACY,
    BASE,
    EXPERTS,
    NO_EXPERT,
    REFERENCES,
    TASK_ID,
    TEST_CONDITIONS,
)
from .notes import Note
from .rows import Row, with_average
from .run import Run
from .statistics import BySeed, Difference, common_seeds, difference, halves

LEAST_GAP = 0.01
"""Smallest merged-to-expert gap in accuracy for a share of it: one point."""
_LOWER = ("loss", "perplexity", "error", "drift")
"""Words in the names of metrics of which lower values are better."""


def is_lower_better(metric: str) -> bool:
    """Return whether lower values of a metric are better."""
    return any(word in metric for word in _LOWER)


class Worst(NamedTuple):
    """The task with the smallest share of its gap or, without shares, with the smallest gain."""

    task: str
    share: float | None
    value: float


@dataclass(frozen=True)
class FrameLine:
    """One model over its seeds.

    Attributes:
        rows: The model's results, one per seed.
        metric: The metric of its values.
        gain: Average minus the merged model's average, over the seeds that both have.
        gains: Task -> gain over the merged model, over these seeds. Positive is better.
        share: Part of the gap from merged model to experts that is recovered, on the average.
        worst: The task that gains least.
    """

    rows: Sequence[Row]
    metric: str
    gain: Difference | None = None
    gains: Mapping[str, float] = field(default_factory=dict)
    share: float | None = None
    worst: Worst | None = None

    @property
    def first(self) -> Row:
        """Results of one seed, for the values that all seeds share."""
        return self.rows[0]

    @property
    def is_merged(self) -> bool:
        """True for a merged model itself."""
        return bool(self.first.merger) and self.first.name == self.first.merger

    @cached_property
    def values(self) -> dict[str, float]:
        """Task (and `average`) -> mean over the seeds, for tasks that all seeds have."""
        return with_average(_means([row.scores.get(self.metric, {}) for row in self.rows]))

    @cached_property
    def halves(self) -> dict[str, float]:
        """Task (and `average`) -> half of the 95 % interval of its value, where there is one."""
        return halves(self.by_seed(self.has_flags)) if self.values else {}

    @property
    def cost(self) -> dict[str, float]:
        """Cost -> mean over the seeds, for costs that were measured with all seeds."""
        return _means([row.cost for row in self.rows])

    @property
    def needs_task_id(self) -> bool | None:
        """True if inference needs the task of each input. None if this is unknown."""
        value = self.cost.get(TASK_ID)
        return None if value is None else bool(value)

    @property
    def samples(self) -> str:
        """The samples per task and their split, such as `256 train`, or "" without samples."""
        used = [entry for row in self.rows for entry in row.samples.values()]
        counts = sorted({int(entry["samples"]) for entry in used})
        if not counts:
            return ""
        number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return " ".join([number, *sorted({str(entry["split"]) for entry in used})])

    @property
    def has_flags(self) -> bool:
        """True if every test example has a flag."""
        is_accuracy = self.metric.removesuffix(NO_EXPERT) == ACCURACY
        return is_accuracy and all(row.correct for row in self.rows)

    def by_seed(self, has_flags: bool) -> BySeed:
        """Return seed -> task -> flags per example, or one value of the whole test set."""
        return {
            row.seed: {
                task: (row.correct or {})[task] if has_flags else np.array([value])
                for task, value in row.scores[self.metric].items()
            }
            for row in self.rows
        }

    def with_seeds(self, seeds: Sequence[object]) -> "FrameLine":
        """Return the line over some seeds only. Results without randomness count for all seeds."""
        return replace(self, rows=[row for row in self.rows if row.seed in (None, *seeds)])

    def is_partner(self, other: "FrameLine") -> bool:
        """Return whether this line's model may be the merged model or the experts of another line.

        Values that both have must be equal: their labels, and this line's settings and the other
        line's conditions. In these conditions, the merger's name precedes a setting that both
        methods have.
        """
        row, merger = other.first, self.first.merger
        other_columns: dict[str, Any] = {
            key: label(value)
            for key, value in row.point.items()
            if key.partition(".")[0] not in row.settings
        } | row.labels
        own_columns = {key: label(v) for key, v in self.first.point.items()} | self.first.labels
        return all(
            other_columns.get(f"{merger}.{key}", other_columns.get(key, value)) == value
            for key, value in own_columns.items()
            if key != SAMPLES
        )

    def record(self) -> dict[str, Any]:
        """Return column -> value."""
        row, gain, worst = self.first, self.gain, self.worst
        values = {value_column(self.metric, task): value for task, value in self.values.items()}
        gain_columns = {"gain": gain.value, "half": gain.half} if gain else {}
        worst_columns = dict(zip(ROW_COLUMNS[6:9], worst, strict=True)) if worst else {}
        return {
            "suite": row.suite, "merger": row.merger, "row": row.name,
            **{setting_column(key, [self.metric]): value for key, value in row.labels.items()},
            **gain_columns, "share": self.share, **worst_columns,
            "seeds": len(self.rows), "samples": self.samples,
            **{f"{COST}{what}": value for what, value in self.cost.items()}, **values,
        }  # fmt: skip


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each value that all mappings have."""
    shared = (key for key in values[0] if all(key in mapping for mapping in values))
    return {key: fmean(mapping[key] for mapping in values) for key in shared}


@dataclass(frozen=True)
class Frame:
    """All lines of joined runs for one metric.

    Attributes:
        metric: The metric.
        lines: Base, experts, then each merged model before its repairs, suite by suite.
        labels: Names of the settings that differ between models of one name.
        notes: Notes of the runs.
    """

    metric: str
    lines: Sequence[FrameLine] = ()
    labels: Sequence[str] = ()
    notes: Sequence[Note] = ()

    @property
    def tasks(self) -> list[str]:
        """The tasks that some line has."""
        tasks = dict.fromkeys(task for line in self.lines for task in line.values)
        return [task for task in tasks if task != AVERAGE]

    @property
    def sign(self) -> int:
        """1 if higher values are better, -1 if lower values are (losses, errors)."""
        return -1 if is_lower_better(self.metric) else 1

    def by_suite(self) -> dict[str, "Frame"]:
        """Return suite -> the frame of this suite, with the settings that differ in it."""
        return {
            suite: Frame(self.metric, lines, [key for key in self.labels
                                              if any(key in line.first.labels for line in lines)])
            for suite, lines in grouped(self.lines, lambda line: line.first.suite).items()
        }  # fmt: skip

    @property
    def columns(self) -> list[str]:
        """Names of the columns of `records`: compared values first, tasks last."""
        labels = [setting_column(key, [self.metric]) for key in self.labels]
        position, row_columns = ROW_COLUMNS[:3], ROW_COLUMNS[3:]
        costs = dict.fromkeys(f"{COST}{what}" for line in self.lines for what in line.cost)
        average, *tasks = (value_column(self.metric, task) for task in (AVERAGE, *self.tasks))
        return [*position, *labels, average, *row_columns, *costs, *tasks]

    def records(self) -> list[dict[str, Any]]:
        """Return column -> value for every line."""
        return [line.record() for line in self.lines]


def frame_of(results: Results, metric: str | None = None) -> Frame:
    """Return the frame of joined runs.

    Args:
        results: Joined runs.
        metric: Name of the metric, such as `loss`. None: accuracy or, if no model has one, the
            first metric. Without any metric, the lines have no values.

    Raises:
        ReportError: If no model has the metric.
    """
    if metric is None:
        metric = ACCURACY if ACCURACY in results.metrics else next(iter(results.metrics), ACCURACY)
    elif metric not in results.metrics:
        raise ReportError(
            f"--metric: no model has {metric!r}; there are {', '.join(results.metrics) or 'none'}"
        )
    lines = [line for line in _make_lines(results, metric) if line.values or not results.metrics]
    compared = [_compare_with_merged(line, lines, Frame(metric).sign) for line in lines]
    return Frame(metric, compared, results.labels, results.notes)


def accuracy_frame(run: Run) -> Frame:
    """Return the frame of one run's accuracies, without lines if no model was evaluated."""
    results = join({Path(): run})
    return frame_of(results, ACCURACY) if run.tasks else Frame(ACCURACY, notes=results.notes)


def summary(results: Results, metric: str | None = None) -> Any:
    """Return the frame of joined runs as a pandas DataFrame, the table of `report.csv`.

    Columns: `suite`, `merger`, `row`, the settings that differ, `accuracy.average` (or of another
    metric); for repairs `gain` over the merged model, `half` of its 95 % interval, `share`
    of the gap to the experts, and the task with the smallest share: `worst_task`, `worst_share`,
    `worst_value`; then `seeds`, `samples`, costs `cost.*`, and the tasks, such as `accuracy.cars`.
    Arguments and errors are those of `frame_of`.
    """
    from pandas import DataFrame  # slow to import

    frame = frame_of(results, metric)
    table = DataFrame(frame.records(), columns=frame.columns, dtype=object)
    labels = [setting_column(key, [frame.metric]) for key in frame.labels]
    numbers = [head for head in frame.columns if head not in labels]  # 8 samples stay an integer
    table[numbers] = table[numbers].infer_objects()
    return table


def _make_lines(results: Results, metric: str) -> list[FrameLine]:
    """Group results by model, and order the models: base, experts, then each merger's."""

    def model_key(row: Row) -> str:
        return as_key([row.suite, row.merger, row.name, row.point, row.seed is None])

    suites = list(dict.fromkeys(row.suite for row in results.rows))
    mergers = list(dict.fromkeys((row.suite, row.merger) for row in results.rows))
    names = list(dict.fromkeys(row.name for row in results.rows))

    def order(line: FrameLine) -> tuple[object, ...]:
        row = line.first
        references = (suites.index(row.suite), bool(row.merger), row.name != BASE)
        labels = [(isinstance(value, str), value) for value in row.labels.values()]
        position = mergers.index((row.suite, row.merger)), row.is_repair, names.index(row.name)
        return *references, *position, labels

    return sorted(
        (FrameLine(rows, metric) for rows in grouped(results.rows, model_key).values()), key=order
    )


def find_partner(line: FrameLine, lines: Iterable[FrameLine], name: str) -> FrameLine | None:
    """Find the merged model, the experts or the base for a line at its point.

    Returns None if there is none, or if the settings fit several.
    """
    suite, merger = line.first.suite, "" if name in REFERENCES else name
    chosen = [
        other
        for other in lines
        if (other.first.suite, other.first.merger, other.first.name) == (suite, merger, name)
        and other.is_partner(line)
    ]
    return chosen[0] if len(chosen) == 1 else None


def share_tests(line: FrameLine, other: FrameLine) -> bool:
    """Return whether no condition says that two lines have different tests."""
    one, two = line.first.point, other.first.point
    return all(one[key] == two[key] for key in TEST_CONDITIONS if key in one and key in two)


def paired(line: FrameLine, other: FrameLine) -> tuple[BySeed, BySeed]:
    """Return the values of two lines by seed, as flags only if both lines have flags."""
    has_flags = line.has_flags and other.has_flags
    return line.by_seed(has_flags), other.by_seed(has_flags)


def _compare_with_merged(line: FrameLine, lines: Sequence[FrameLine], sign: int) -> FrameLine:
    """Complete a line with its gain over the merged model, its share and its worst task."""
    merged = find_partner(line, lines, line.first.merger)
    if not (line.first.is_repair and merged and line.values):
        return line
    pair = paired(line, merged)
    gain = difference(*pair)
    if gain is None:
        return line
    seeds = common_seeds(*pair)
    experts = find_partner(line, lines, EXPERTS)
    after, before = line.with_seeds(seeds).values, merged.with_seeds(seeds).values
    expert_values = experts.values if experts else {}
    gains = {task: sign * (after[task] - before[task]) for task in after if task in before}
    gaps = {
        task: sign * (expert_values[task] - before[task]) for task in gains if task in expert_values
    }
    least_gap = LEAST_GAP * (1 - 1e-9) if sign > 0 else 0.0
    shares = {task: gains[task] / gap for task, gap in gaps.items() if gap > least_gap}
    share = shares.pop(AVERAGE, None)
    del gains[AVERAGE]
    values = shares or gains  # without shares, the worst task has the smallest gain
    task = min(values, key=values.__getitem__)
    worst = Worst(task, shares.get(task), after[task])
    return replace(line, gain=gain, gains=gains, share=share, worst=worst)
