"""Results of one command in memory: the models, their lines, and notes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.errors.masking import masked
from fusion_bench_featcal.files.json_files import plain
from fusion_bench_featcal.run.log import AsMerged

from .columns import DIMENSIONS
from .names import DISTANCE, DRIFT, REFERENCES
from .notes import WARNING, Note
from .rows import Line, Row, check_row

Scores = Mapping[str, Mapping[str, float]]
"""Metric -> task -> value."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a model besides its scores, time and memory, for its report and its card.

    Attributes:
        settings: Settings of its method.
        seed: Seed of samples and training, or None without randomness.
        samples: Task -> {"samples", "split"} used, empty for methods without data.
        cost: Further costs.
        numbers: Further numbers of the method, which become `Row.facts`.
        drift: Task -> final drift relative to the expert's features.
        distances: Task -> distance from its expert after the last block.
        lines: Lines of the long table.
        notes: Sentences for the reader.
        files: Name -> text of a file in the run's folder.
        as_merged: Modules that were not calibrated.
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
    """Results of one command.

    Attributes:
        suite: Name of the model pool.
        merger: The upstream merger, or "" if there are several.
        rows: The models.
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
        """Name -> task (and `average`) -> accuracy, with names as in `title`."""
        return {self.title(row): row.accuracy for row in self.rows if row.tasks}

    @property
    def tasks(self) -> list[str]:
        """Tasks of the first evaluated model."""
        return next((row.tasks for row in self.rows if row.tasks), [])

    def row(self, name: str) -> Row:
        """Return the model of a name, which is unique in a run with one merger."""
        return next(row for row in self.rows if row.name == name)

    def add_row(self, name: str, scores: Scores, **details: Any) -> Row:
        """Add one model's results. Values that are not finite become notes.

        Args:
            name: The model's name, which must be new.
            scores: Metric -> task -> value, empty for a model that was not evaluated.
            **details: Further attributes of `Row`.

        Raises:
            ReportError: If the name exists, or for a reason of `check_row`.
        """
        if any(row.name == name for row in self.rows):
            raise ReportError(f"model '{name}' is already in the report")
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
        """Add a method's model with its facts, lines and notes. Raises as `add_row`."""
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
        """Return a model's name, as `merger/name` in a run with several mergers."""
        return row.name if self.merger else row.title


def conditions_of(
    merger: str, merger_settings: Mapping[str, object], settings: Mapping[str, object]
) -> dict[str, object]:
    """Return the upstream merger's settings as conditions of a model made from its merged model.

    A key that is also one of the model's own settings gets the merger's name as a prefix.
    """
    return {
        f"{merger}.{key}" if key in settings else key: merger_settings[key]
        for key in merger_settings
    }


def training_lines(row: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> list[Line]:
    """Return training losses, task -> (step, loss), as lines of the blocks `step n`."""
    return [
        {"row": row, "task": task, "block": f"step {step}", "metric": "training_loss",
         "value": float(loss)}
        for task, points in curves.items()
        for step, loss in points
    ]  # fmt: skip
