"""Results of one run in memory: rows of accuracies and their conditions."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.json_files import plain

from .items import Items, as_correct
from .long_table import (
    ACCURACY,
    AVERAGE,
    COMPARISON_SEED,
    COST,
    DIMENSIONS,
    EXPERTS,
    GAIN,
    LOSS,
    NORMALISED,
    SHARE,
    VALUE,
    Line,
    is_repair,
)
from .measures import mean, normalised_average, recovered_share, worst_task
from .notes import LOSS as LOSS_NOTE
from .notes import Note
from .schema import SCHEMA, TOLERANCE, check_row


def finite_losses(loss: Mapping[str, float | None]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the losses that are finite by task, and a sentence for each that is not."""
    known_losses = {task: float(value) for task, value in loss.items() if value is not None}
    finite = {task: value for task, value in known_losses.items() if math.isfinite(value)}
    return finite, {
        t: f"the loss of {t} is {v}" for t, v in known_losses.items() if t not in finite
    }


@dataclass(kw_only=True)
class RunRows:
    """Results of one run and their conditions.

    Rows are named `base`, `experts`, by the upstream merger, `featcal` and `featcal_<preset>`, or
    by another method.
    """

    suite: str = "unnamed"
    """Name of the model pool, for example `clip-vit-mini_TA6`."""
    upstream: str | None = None
    """The row of the upstream merger, for example `task_arithmetic`."""
    rows: dict[str, dict[str, float]] = field(default_factory=dict)
    """Row -> task -> accuracy in 0..1, and `average` (mean over tasks)."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Row -> its settings."""
    cost: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Row -> seconds, peak_rss_bytes, expert_bytes and others, "unavailable" if not measured."""
    samples: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Row -> task -> {"samples": number used, "split": calibration split}."""
    seeds: dict[str, int | None] = field(default_factory=dict)
    """Seeds by purpose, for example {"calibration": 42}."""
    labels: dict[str, Any] = field(default_factory=dict)
    """Settings that differ between runs in one table, such as {"samples_per_task": 8}."""
    test_sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task -> {"items": number of test items, ...}, which is equal for comparable runs."""
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    """Notes for the reader, for example "calibrated on the test split"."""
    loss: dict[str, dict[str, float]] = field(default_factory=dict)
    """Row -> task -> loss, and `average` if every task has one. Rows without losses are absent."""
    items: Items = field(default_factory=dict, repr=False)
    """Row -> task -> bool `[items]`, stored in `items.npz` next to the report."""
    more: list[Line] = field(default_factory=list, repr=False)
    """Further lines of the long table, such as a diagnosis, only stored in `lines.csv`."""
    schema: int = SCHEMA

    @property
    def tasks(self) -> list[str]:
        """Task names in the order of the first row."""
        first = next(iter(self.rows.values()), {})
        return [task for task in first if task != AVERAGE]

    def add_row(
        self,
        name: str,
        accuracies: Mapping[str, Any],
        *,
        settings: Any = None,
        cost: Mapping[str, Any] | None = None,
        samples: Mapping[str, Mapping[str, Any]] | None = None,
        correct: Mapping[str, Any] | None = None,
        loss: Mapping[str, float | None] | None = None,
    ) -> None:
        """Add one model's results.

        Args:
            name: Row name, which must be new.
            accuracies: Task -> accuracy in 0..1. The average is computed here.
            settings: Mapping or dataclass with the row's settings.
            cost: Its cost (see `Report.cost`).
            samples: Calibration samples used (see `Report.samples`).
            correct: Task -> bool `[items]`, for intervals. Its mean must be the accuracy.
            loss: Task -> loss, or None. A loss that is not finite becomes a note.

        Raises:
            ReportError: If the name exists, tasks differ from earlier rows, an accuracy is outside
                0..1, or `correct` contradicts it.
        """
        if name in self.rows:
            raise ReportError(f"row '{name}' is already in the report")
        row = {task: float(value) for task, value in accuracies.items() if task != AVERAGE}
        check_row(name, row, self.tasks, "report")
        row = {task: row[task] for task in self.tasks or row}
        if correct is not None:
            self._add_items(name, row, correct)
        self.rows[name] = {**row, AVERAGE: mean(row)}
        details = ((self.settings, settings), (self.cost, cost), (self.samples, samples))
        for column, value in details:
            if value is not None:
                column[name] = plain(value, name)
        finite, infinite = finite_losses({task: (loss or {}).get(task) for task in self.tasks})
        self.note(*(Note(LOSS_NOTE, text, name, task) for task, text in infinite.items()))
        if finite:
            average = {AVERAGE: mean(finite)} if len(finite) == len(self.tasks) else {}
            self.loss[name] = finite | average

    def note(self, *notes: Note) -> None:
        """Add notes with the run's merger."""
        self.notes += [replace(note, merger=self.upstream or "") for note in notes]

    def _add_items(self, name: str, row: Mapping[str, float], correct: Mapping[str, Any]) -> None:
        items = {}
        for task, accuracy in row.items():
            label = f"row '{name}', task '{task}'"
            if task not in correct:
                raise ReportError(f"{label}: no flags per test item")
            flags = items[task] = as_correct(correct[task], label)
            if abs(float(flags.mean()) - accuracy) > TOLERANCE:
                raise ReportError(
                    f"{label}: {flags.sum()} of {flags.size} test items are right, "
                    f"which is not the accuracy {accuracy:.6f}"
                )
            size = self.test_sets.get(task, {}).get("items", flags.size)
            if size != flags.size:
                raise ReportError(f"{label}: {flags.size} test items, the test set has {size}")
        for task, flags in items.items():
            self.test_sets.setdefault(task, {})["items"] = flags.size
        self.items[name] = items

    @property
    def _merged(self) -> dict[str, float] | None:
        return self.rows.get(self.upstream or "")

    @property
    def recovered_gap(self) -> dict[str, float | None]:
        """Return row -> (row - merged) / (experts - merged) on the average, None if undefined."""
        return {name: self.share(name, AVERAGE) for name in self.rows}

    def share(self, name: str, task: str) -> float | None:
        """Return the share of the gap that row `name` recovers on `task` (or `average`)."""
        merged, experts = self._merged, self.rows.get(EXPERTS)
        if merged is None or experts is None:
            return None
        return recovered_share(self.rows[name][task], merged[task], experts[task])

    def worst(self, name: str) -> tuple[str, float | None] | None:
        """Return a row's worst task and the share of its gap recovered, or None for references."""
        if not is_repair(name, self.upstream):
            return None
        return worst_task(self.rows[name], self._merged, self.rows.get(EXPERTS))

    @property
    def seeds_key(self) -> str:
        """Return the run's seeds as one text. Runs that are averaged have different texts."""
        return json.dumps(self.seeds, sort_keys=True)

    @property
    def seed(self) -> Any:
        """The comparison's seed or the rows' only one, else `seeds_key`. None without any seed."""
        numbers = {self.seeds.get(COMPARISON_SEED)} - {None} or {*self.seeds.values()} - {None}
        return self.seeds_key if len(numbers) > 1 else next(iter(numbers), None)

    def lines(self) -> list[Line]:
        """Return the long table of the run: all measured values and values derived from them."""
        seed = "" if self.seed is None else self.seed
        of_run = {**self.labels, **dict.fromkeys(DIMENSIONS, "")}
        of_run |= {"suite": self.suite, "merger": self.upstream or "", "seed": seed}
        lines = [
            {"row": row, "task": task, "metric": metric, VALUE: value}
            for row in self.rows
            for metric, values in self._metrics(row).items()
            for task, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        ]
        return [of_run | line for line in (*lines, *self.more)]

    def _metrics(self, name: str) -> dict[str, Mapping[str, Any]]:
        """Return metric -> task, `average` or "" -> value, for one row."""
        row, merged = self.rows[name], self._merged
        cost = self.cost.get(name, {})
        return {
            ACCURACY: row,
            LOSS: self.loss.get(name, {}),
            NORMALISED: {AVERAGE: normalised_average(row, self.rows.get(EXPERTS))},
            GAIN: {AVERAGE: merged and row[AVERAGE] - merged[AVERAGE]},
            SHARE: {task: self.share(name, task) for task in row},
            **{COST + what: {"": value} for what, value in cost.items()},
        }
