"""One model's results, and their checks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from fusion_bench_featcal.errors import ReportError

from .columns import AVERAGE, COST, DIMENSIONS, VALUE, setting_column
from .names import ACCURACY, REFERENCES

Line = dict[str, Any]
"""Dimension -> name, and `value` -> number."""

_ROUNDING = 1e-5  # accuracies are rounded to float32 on their way into a report


class Used(TypedDict):
    """Number and split of the samples of a task that a method used."""

    samples: int
    split: str


@dataclass(kw_only=True)
class Row:
    """One model's results.

    Attributes:
        suite: Name of the model pool, for example `clip-vit-mini_TA6`.
        merger: The merging method, or "" for the base and the experts, which need none.
        name: `base`, `experts`, the merging method's name for the merged model itself, or the name
            of the method that repairs it.
        seed: Seed of samples and training, or None without randomness.
        scores: Metric -> task -> value, with `accuracy` in 0..1.
        correct: Task -> bool `[examples]`, a flag per test example, or None if the pool has none.
        settings: Settings of the method or merging method.
        conditions: Further values by which models differ: precision, and for a repair the settings
            of the merging method.
        cost: Seconds, bytes and others, as numbers. Costs that were not measured are missing.
        facts: Further numbers of the method, such as the median of `rows_share`.
        samples: Task -> {"samples", "split"} used, empty for methods without data.
        point: All values, flat and without seeds, that distinguish the model from others. Set by
            `join`.
        labels: The values of `point` that differ between joined models of its name, as numbers or
            texts. Set by `join`.
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
        """True for a model made from a merged one, unlike base, experts and the merged model."""
        return self.name not in (*REFERENCES, self.merger)

    @property
    def title(self) -> str:
        """`merger/name` for a repair, else the name."""
        return f"{self.merger}/{self.name}" if self.is_repair and self.merger else self.name

    def lines(self) -> list[Line]:
        """Return the model's numbers as lines of the long table, each metric with its average."""
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


def with_average(values: Mapping[str, float]) -> dict[str, float]:
    """Add the mean over tasks as `average`, unless there are none."""
    mean = {AVERAGE: math.fsum(values.values()) / len(values)} if values else {}
    return {**values, **mean}


def check_row(row: Row, tasks: Sequence[str], label: str) -> None:
    """Check a model's accuracies against its flags, which become arrays, and against `tasks`.

    Args:
        row: The model.
        tasks: Tasks of the models before, or none.
        label: Name of the report in messages.

    Raises:
        ReportError: If the tasks differ, a name is taken, an accuracy is outside 0..1, or flags per
            example contradict it.
    """
    label = f"{label}: model '{row.name}'"
    accuracy = row.scores.get(ACCURACY, {})
    if any(AVERAGE in values for values in row.scores.values()):
        raise ReportError(f"{label}: '{AVERAGE}' is the mean over tasks. Rename the task")
    if taken := [metric for metric in row.scores if f"{metric}.".startswith(COST)]:
        raise ReportError(f"{label}: metric {taken[0]!r} is reserved for costs. Rename the metric")
    if tasks and accuracy and set(accuracy) != set(tasks):
        missing, extra = sorted(set(tasks) - set(accuracy)), sorted(set(accuracy) - set(tasks))
        raise ReportError(
            f"{label} does not have the same tasks as the models before: missing {missing}, extra "
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
            raise ReportError(f"{label}, task '{task}': no flags per test example")
        if abs(float(flags.mean()) - value) > _ROUNDING:
            raise ReportError(
                f"{label}, task '{task}': {flags.sum()} of {flags.size} test examples are right, "
                f"which is not the accuracy {value:.6f}"
            )
