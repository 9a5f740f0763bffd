"""Results of one run in memory: models measured on tasks, and how they were made."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.errors.masking import masked
from fusion_bench_featcal.files.json_files import plain
from fusion_bench_featcal.run.log import AsMerged

from .columns import AVERAGE, COST, DIMENSIONS, VALUE, setting_column
from .notes import WARNING, Note

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

BASE = "base"
EXPERTS = "experts"
REFERENCES = (BASE, EXPERTS)
FEATCAL, FEATCAL_PLUS = "featcal", "featcal_plus"
MERGED = "merged"
"""Row of a merged model with an unknown merger, and in figures with a panel for each merger."""
ACCURACY = "accuracy"
DRIFT = "relative_drift"
"""Metric of calibrated models, measured on samples: see `Facts.drift`."""
ROWS_SHARE, ROWS_ENERGY, ROWS_ERROR = "rows_share", "rows_energy", "rows_error"
"""Figures of FeatCal+: see `remarks.facts_of_log` and `remarks.share_lines`."""
DISTANCE, WEIGHT = "distance", "weight"
"""A task's distance from its expert (`run/log.py`), and the factor of its weight by `balance`."""
SLOTS, IDLE = "routed_experts", "routed_experts_without_tokens"
"""Numbers of a mixture's routed experts, and of those that no sample reaches."""
TASK_ID = "task_id_at_inference"
"""Cost of methods that need the task of each input."""
INPUTS = "inputs"
"""Condition of rows: digest of the models and data of their run."""
TEST_CONDITIONS = ("precision", "tasks", INPUTS)
"""Conditions of evaluation. Rows that differ in them are never compared."""
Line = dict[str, Any]
"""Dimension -> name, and `value` -> number."""
Scores = Mapping[str, Mapping[str, float]]
"""Metric -> task -> value."""

_ROUNDING = 1e-5  # accuracies are rounded to float32 on their way into a report


class Used(TypedDict):
    """Samples of a task that a method used."""

    samples: int
    split: str


@dataclass(kw_only=True)
class Row:
    """One model's results.

    Attributes:
        suite: Name of the model pool, for example `clip-vit-mini_TA6`.
        merger: The upstream merger, or "" for the base and the experts, which need none.
        name: `base`, `experts`, the merger's name for the merged model itself, or a method's.
        seed: Seed of samples and training, or None without randomness.
        scores: Metric -> task -> value, with `accuracy` in 0..1.
        correct: Task -> bool `[items]`, a flag per test item, or None if the pool has none.
        settings: Settings of the method or merger.
        conditions: Further values by which rows differ: precision, and settings of the upstream
            merger for a method on it.
        cost: Seconds, bytes and others, as numbers. What was not measured is missing.
        facts: Further numbers of the method, such as the median of `rows_share`.
        samples: Task -> {"samples", "split"} used, empty for methods without data.
        point: All values that make the row another one, flat, but for seeds. Set by `join`.
        labels: Those that differ between joined rows of its name, as numbers or texts. Set by
            `join`.
    """

    suite: str
    merger: str
    name: str
    seed: int | None = None
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    correct: Mapping[str, NDArray[np.bool_]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    samples: dict[str, Used] = field(default_factory=dict)
    point: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)

    @property
    def accuracy(self) -> dict[str, float]:
        """Task (and `average`) -> accuracy, empty if the model was not evaluated."""
        return with_average(self.scores.get(ACCURACY, {}))

    @property
    def tasks(self) -> list[str]:
        """The evaluated tasks."""
        return list(self.scores.get(ACCURACY, {}))

    @property
    def is_repair(self) -> bool:
        """True for a model made from a merged one, unlike base, experts and the merger's row."""
        return self.name not in (*REFERENCES, self.merger)

    @property
    def title(self) -> str:
        """`merger/row` for a repair, else the row's name."""
        return f"{self.merger}/{self.name}" if self.is_repair and self.merger else self.name

    def lines(self) -> list[Line]:
        """Return the row's numbers as lines of the long table, each metric with its average."""
        seed = "" if self.seed is None else self.seed
        position = dict.fromkeys(DIMENSIONS, "")
        position |= {"suite": self.suite, "merger": self.merger, "row": self.name, "seed": seed}
        averaged = {m: v if set(v) < set(self.tasks) else with_average(v)
                  for m, v in self.scores.items()}  # fmt: skip
        averaged |= {f"{COST}{what}": {"": value} for what, value in self.cost.items()}
        labels = {setting_column(key): value for key, value in self.labels.items()}
        return [
            {**labels, **position, "task": task, "metric": metric, VALUE: value}
            for metric, values in averaged.items()
            for task, value in values.items()
        ]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that a report has of a model besides its scores, time and memory.

    Attributes:
        settings: Settings of its method.
        seed: Seed of samples and training, or None without randomness.
        samples: Task -> {"samples", "split"} used, empty for methods without data.
        cost: Further costs.
        numbers: Further numbers of the method, which become `Row.facts`.
        drift: Task -> final drift relative to the expert's features.
        distances: Task -> distance from its expert behind the last block.
        lines: Lines of the long table.
        notes: Sentences for the reader.
        files: Name -> text of a file in the run's folder.
        as_merged: Modules that a calibration left as merged.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    samples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    drift: Mapping[str, float] = field(default_factory=dict)
    distances: Mapping[str, float] = field(default_factory=dict)
    lines: Sequence[Line] = ()
    notes: Sequence[Note] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    as_merged: AsMerged = field(default_factory=AsMerged)


@dataclass(kw_only=True)
class Run:
    """Rows of one command and their conditions.

    Attributes:
        suite: Name of the model pool.
        merger: The upstream merger, or "" if there are several.
        rows: The rows.
        lines: Further lines of the long table, such as a diagnosis by block.
        versions: Package -> version.
        device: Device -> description.
        notes: Sentences for the reader.
    """

    suite: str = "unnamed"
    merger: str = ""
    rows: list[Row] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, str | int] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """Row -> task (and `average`) -> accuracy. Rows of several mergers are `merger/row`."""
        return {self.title(row): row.accuracy for row in self.rows if row.tasks}

    @property
    def tasks(self) -> list[str]:
        """Tasks of the first evaluated row."""
        return next((row.tasks for row in self.rows if row.tasks), [])

    def row(self, name: str) -> Row:
        """Return the row of a name, which is unique in a run with one merger."""
        return next(row for row in self.rows if row.name == name)

    def add_row(self, name: str, scores: Scores, **details: Any) -> Row:
        """Add one model's results. Values that are not finite become notes.

        Args:
            name: The row's name, which must be new.
            scores: Metric -> task -> value, empty for a model that was not evaluated.
            **details: Further attributes of `Row`.

        Raises:
            ReportError: If the name exists, tasks differ from those of earlier rows, an accuracy is
                outside 0..1, or flags per item contradict it.
        """
        if any(row.name == name for row in self.rows):
            raise ReportError(f"row '{name}' is already in the report")
        finite: dict[str, dict[str, float]] = {}
        for metric, values in scores.items():
            for task, value in values.items():
                if math.isfinite(value):
                    finite.setdefault(metric, {})[task] = float(value)
                else:
                    self.note(Note(WARNING, f"the {metric} of {task} is {value}", name, task))
        merger = "" if name in REFERENCES else self.merger
        row = Row(suite=self.suite, merger=merger, name=name, scores=finite, **details)
        check_row(row, self.tasks, "report")
        for key in ("settings", "conditions", "cost", "facts", "samples"):
            setattr(row, key, plain(getattr(row, key), f"{name}.{key}"))
        self.rows.append(row)
        return row

    def add_model(
        self,
        name: str,
        scores: Scores,
        facts: Facts,
        *,
        correct: Mapping[str, object] | None = None,
        cost: Mapping[str, float] | None = None,
    ) -> Row:
        """Add the results of a method's model, with its lines and notes. Raises as `add_row`."""
        if any(entry["split"] == "test" for entry in facts.samples.values()):
            self.note(Note(WARNING, f"{name} was made with samples of the test split"))
        self.note(*facts.notes)
        self.lines += facts.lines
        measured = {DRIFT: facts.drift, DISTANCE: facts.distances}
        return self.add_row(
            name,
            {**scores, **{metric: values for metric, values in measured.items() if values}},
            correct=correct,
            settings=dict(facts.settings),
            seed=facts.seed,
            samples=dict(facts.samples),
            cost={**(cost or {}), **facts.cost},
            facts=dict(facts.numbers),
        )

    def note(self, *notes: Note) -> None:
        """Add notes with the run's merger."""
        self.notes += [
            replace(note, text=masked(note.text), merger=note.merger or self.merger)
            for note in notes
        ]

    def all_lines(self) -> list[Line]:
        """Return the long table of the run."""
        return [*(line for row in self.rows for line in row.lines()), *self.more_lines()]

    def more_lines(self) -> list[Line]:
        """Return `lines` with all dimensions."""
        run_columns = dict.fromkeys(DIMENSIONS, "") | {"suite": self.suite, "merger": self.merger}
        return [run_columns | line for line in self.lines]

    def title(self, row: Row) -> str:
        """Return a row's name, as `merger/row` in a run with several mergers."""
        return row.name if self.merger else row.title


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return values by a key, in order of appearance."""
    groups: dict[K, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def label_texts(labels: Mapping[str, object]) -> list[str]:
    """Return labels as texts, such as `n = 8`."""
    return [f"{short_label(key)} = {value}" for key, value in labels.items()]


def short_label(key: str) -> str:
    """Return the name of a setting in tables."""
    return "n" if key == "samples_per_task" else key


def row_of_rule(rule: object) -> str:
    """Return the row of a model that was calibrated with a rule."""
    return FEATCAL_PLUS if rule == "plus" else FEATCAL


def file_suffix(row: str) -> str:
    """Return the ending of a FeatCal row's file names: `.plus` for `featcal_plus`."""
    return row.removeprefix(FEATCAL).replace("_", ".", 1)


def calibration_log(row: str) -> str:
    """Return the name of a FeatCal row's calibration log in a run's folder."""
    return f"calibration_log{file_suffix(row)}.jsonl"


def conditions_of(
    merger: str, merger_settings: Mapping[str, object], settings: Mapping[str, object]
) -> dict[str, object]:
    """Return the upstream merger's settings as conditions of a row made from its model.

    Keys that the row's settings have too get the merger's name.
    """
    return {
        f"{merger}.{key}" if key in settings else key: merger_settings[key]
        for key in merger_settings
    }


def training_lines(row: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> list[Line]:
    """Return a training, task -> (step, loss), as lines `training_loss` of the block `step n`."""
    return [
        {"row": row, "task": task, "block": f"step {step}", "metric": "training_loss",
         "value": float(loss)}
        for task, points in curves.items()
        for step, loss in points
    ]  # fmt: skip


def with_average(values: Mapping[str, float]) -> dict[str, float]:
    """Add the mean over tasks as `average`, unless there are none."""
    mean = {AVERAGE: math.fsum(values.values()) / len(values)} if values else {}
    return {**values, **mean}


def check_row(row: Row, tasks: Sequence[str], label: str) -> None:
    """Check accuracies against the tasks of the rows before and the row's flags, which it converts.

    Raises:
        ReportError: As `Run.add_row`.
    """
    label = f"{label}: row '{row.name}'"
    accuracy = row.scores.get(ACCURACY, {})
    if any(AVERAGE in values for values in row.scores.values()):
        raise ReportError(f"{label}: '{AVERAGE}' is the mean over tasks. Rename the task")
    if taken := [metric for metric in row.scores if f"{metric}.".startswith(COST)]:
        raise ReportError(f"{label}: metric {taken[0]!r} is taken by costs. Rename the metric")
    if tasks and accuracy and set(accuracy) != set(tasks):
        missing, extra = sorted(set(tasks) - set(accuracy)), sorted(set(accuracy) - set(tasks))
        raise ReportError(
            f"{label} is not about the same tasks as the rows before: missing {missing}, extra "
            f"{extra}"
        )
    for task, value in accuracy.items():
        if not 0 <= value <= 1:
            raise ReportError(f"{label}, task '{task}': accuracy {value} is not in 0..1")
    if row.correct is None:
        return
    row.correct = {
        task: np.asarray(flags, np.bool_).reshape(-1) for task, flags in row.correct.items()
    }
    for task, value in accuracy.items():
        flags = row.correct.get(task)
        if flags is None or not flags.size:
            raise ReportError(f"{label}, task '{task}': no flags per test item")
        if abs(float(flags.mean()) - value) > _ROUNDING:
            raise ReportError(
                f"{label}, task '{task}': {flags.sum()} of {flags.size} test items are right, "
                f"which is not the accuracy {value:.6f}"
            )
