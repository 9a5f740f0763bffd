"""Report of one run: pure data, in memory and as `report.json`, `.csv` and `.md`."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, prepare_directory, write_atomic
from fusion_bench_featcal.json_files import plain, read_json, sealed_json

from .items import ITEMS_FILE, Items, as_correct, load_items, save_items
from .long_table import (
    ACCURACY,
    AVERAGE,
    CORRECT,
    COST,
    EXPERTS,
    GAIN,
    LOSS,
    NORMALISED,
    SHARE,
    Entry,
    is_repair,
    mean,
    normalised_average,
    recovered_share,
    worst_task,
)
from .run_page import print_run, run_markdown
from .schema import KIND, SCHEMA, TOLERANCE, check_row, check_run

REPORT_FILE = "report.json"


def write_files(
    directory: Path, content: Mapping[str, Any], table: str, page: str, setting: str
) -> Path:
    """Write `report.csv`, `report.md` and, last, `report.json`; return the last one's path."""
    text = sealed_json(content)
    write_atomic(directory / "report.csv", table, setting)
    write_atomic(directory / "report.md", page, setting)
    return write_atomic(directory / REPORT_FILE, text, setting)


def csv_text(columns: Iterable[str], lines: Iterable[Mapping[str, Any]]) -> str:
    """Return a head and lines as CSV; what a line lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def finite_losses(loss: Mapping[str, float | None]) -> tuple[dict[str, float], list[str]]:
    """Return the losses that are finite, and a sentence for each that is not; None says nothing."""
    given = {task: float(value) for task, value in loss.items() if value is not None}
    finite = {task: value for task, value in given.items() if math.isfinite(value)}
    notes = [f"the loss of {task} is {given[task]}" for task in given if task not in finite]
    return finite, notes


@dataclass(kw_only=True)
class Report:
    """Results of one run and the conditions they were made under.

    Rows are named `base`, `experts`, by the upstream merger, `featcal` and `featcal:<preset>`, or
    by another method.
    """

    suite: str = "unnamed"
    """Name of the model pool, for example `clip-vit-mini_TA6`."""
    upstream: str | None = None
    """The row of the upstream merger, for example `task_arithmetic`."""
    rows: dict[str, dict[str, float]] = field(default_factory=dict)
    """Row -> task -> accuracy in 0..1, and `average` (mean over tasks)."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Row -> the settings it was made with."""
    cost: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Row -> seconds, peak_rss_bytes, expert_bytes...; "unavailable" if not measured."""
    samples: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Row -> task -> {"samples": number really used, "split": calibration split}."""
    seeds: dict[str, int | None] = field(default_factory=dict)
    """Seeds by what they seed, for example {"calibration": 42}."""
    test_sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task -> {"items": number of test items, ...}; equal for comparable runs."""
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Sentences a reader must know, for example "calibrated on the test split"."""
    loss: dict[str, dict[str, float]] = field(default_factory=dict)
    """Row -> task -> loss, and `average` where every task has one; without what has none."""
    items: Items = field(default_factory=dict, repr=False)
    """Row -> task -> bool `[items]`, kept in `items.npz` beside the report."""
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
            name: Row name; must be new.
            accuracies: Task -> accuracy in 0..1. The average is computed here.
            settings: Mapping or dataclass of what made the row.
            cost: What it cost, see `Report.cost`.
            samples: Calibration samples really used, see `Report.samples`.
            correct: Task -> bool `[items]`, for intervals; its mean must be the accuracy.
            loss: Task -> loss; None where there is none. One that is not finite becomes a note.

        Raises:
            ReportError: The name is taken, tasks differ from the rows before, an accuracy is
                outside 0..1, or `correct` contradicts it.
        """
        if name in self.rows:
            raise ReportError(f"row '{name}' is already in the report")
        row = {task: float(value) for task, value in accuracies.items() if task != AVERAGE}
        check_row(name, row, self.tasks, "report")
        row = {task: row[task] for task in self.tasks or row}
        if correct is not None:
            self._add_items(name, row, correct)
        self.rows[name] = {**row, AVERAGE: mean(row)}
        made = ((self.settings, settings), (self.cost, cost), (self.samples, samples))
        for column, value in made:
            if value is not None:
                column[name] = plain(value, name)
        finite, notes = finite_losses({task: (loss or {}).get(task) for task in self.tasks})
        self.notes += [f"{name}: {note}" for note in notes]
        if finite:
            average = {AVERAGE: mean(finite)} if len(finite) == len(self.tasks) else {}
            self.loss[name] = finite | average

    def _add_items(self, name: str, row: Mapping[str, float], correct: Mapping[str, Any]) -> None:
        items = {}
        for task, accuracy in row.items():
            place = f"row '{name}', task '{task}'"
            if task not in correct:
                raise ReportError(f"{place}: no flags per test item")
            flags = items[task] = as_correct(correct[task], place)
            if abs(float(flags.mean()) - accuracy) > TOLERANCE:
                raise ReportError(
                    f"{place}: {flags.sum()} of {flags.size} test items are right, "
                    f"which is not the accuracy {accuracy:.6f}"
                )
            size = self.test_sets.get(task, {}).get("items", flags.size)
            if size != flags.size:
                raise ReportError(f"{place}: {flags.size} test items, the test set has {size}")
        for task, flags in items.items():
            self.test_sets.setdefault(task, {})["items"] = flags.size
        self.items[name] = items

    @property
    def _merged(self) -> dict[str, float] | None:
        return self.rows.get(self.upstream or "")

    @property
    def recovered_gap(self) -> dict[str, float | None]:
        """Row -> (row - merged) / (experts - merged) on the average; None where undefined."""
        return {name: self.share(name, AVERAGE) for name in self.rows}

    def share(self, name: str, task: str) -> float | None:
        """Share of the merged-to-expert gap that row `name` recovers on `task` (or `average`)."""
        merged, experts = self._merged, self.rows.get(EXPERTS)
        if merged is None or experts is None:
            return None
        return recovered_share(self.rows[name][task], merged[task], experts[task])

    def worst(self, name: str) -> tuple[str, float | None] | None:
        """A row's worst task and the share of its gap recovered; None for references."""
        if not is_repair(name, self.upstream):
            return None
        return worst_task(self.rows[name], self._merged, self.rows.get(EXPERTS))

    def to_dict(self) -> dict[str, Any]:
        """Return what `report.json` holds."""
        stored = {item.name: getattr(self, item.name) for item in fields(self)}
        del stored["items"]
        return {
            "kind": KIND,
            "schema": stored.pop("schema"),
            "tasks": self.tasks,
            **plain(stored, "report"),
            "recovered_gap": self.recovered_gap,
            "recovered_gap_per_task": {
                name: {task: self.share(name, task) for task in self.tasks} for name in self.rows
            },
        }

    def write(self, directory: str | Path, setting: str = LOG_DIR_SETTING) -> Path:
        """Write `report.csv`, `report.md`, `items.npz` (if known) and, last, `report.json`.

        Each file is whole or absent, whatever happens. Returns the path of `report.json`.
        """
        content = self.to_dict()
        directory = prepare_directory(directory, setting)
        if self.items:
            save_items(directory, self.items, setting)
        else:
            # An earlier report's items would be taken for this one's.
            (directory / ITEMS_FILE).unlink(missing_ok=True)
        return write_files(directory, content, self.csv(), run_markdown(self), setting)

    @classmethod
    def load(cls, directory: str | Path) -> "Report":
        """Read the report that `write` left in `directory`, with its items when there are any.

        Raises:
            ReportError: Something is missing, damaged or of another schema; the message says what.
        """
        path = Path(directory) / REPORT_FILE
        content = read_json(path)
        check_run(content, str(path))
        names = [key.name for key in fields(cls) if key.name != "items" and key.name in content]
        report = cls(**{name: content[name] for name in names})
        for name, flags in (load_items(Path(directory)) or {}).items():
            if name not in report.rows:
                raise ReportError(f"{path}: items.npz has row '{name}', the report has not")
            row = {task: report.rows[name][task] for task in report.tasks}
            try:
                report._add_items(name, row, flags)
            except ReportError as error:
                raise ReportError(f"{path.with_name(ITEMS_FILE)}: {error}") from error
        return report

    @property
    def seeds_key(self) -> str:
        """Return the run's seeds as one text: runs that are averaged differ in it."""
        return json.dumps(self.seeds, sort_keys=True)

    def entries(self) -> Iterator[Entry]:
        """Yield the long table of the run: everything that it measured or that follows from it."""
        for name, row in self.rows.items():
            place, seed = (self.suite, self.upstream, name), self.seeds_key
            measured = {
                ACCURACY: row,
                LOSS: self.loss.get(name, {}),
                NORMALISED: {AVERAGE: normalised_average(row, self.rows.get(EXPERTS))},
                GAIN: {AVERAGE: self._merged and row[AVERAGE] - self._merged[AVERAGE]},
                SHARE: {task: self.share(name, task) for task in row},
                **{COST + what: {"": value} for what, value in self.cost.get(name, {}).items()},
                CORRECT: self.items.get(name, {}),
            }
            for metric, values in measured.items():
                for task, value in values.items():
                    if value is not None:
                        yield Entry(*place, task, seed, metric, value)

    def csv(self) -> str:
        """Return the long form: one line per row and task (the average counts as a task)."""
        metrics = (ACCURACY, SHARE, LOSS)
        lines: dict[tuple[str, str], dict[str, str | None]] = {}
        for entry in self.entries():
            if entry.metric in metrics:
                place = {"suite": entry.suite, "upstream": entry.merger}
                place |= {"name": entry.row, "task": entry.task}
                line = lines.setdefault((entry.row, entry.task), place)
                line[entry.metric] = f"{entry.value:.6f}"
        return csv_text(("suite", "upstream", "name", "task", *metrics), lines.values())

    def show(self, *, losses: bool = False) -> None:
        """Print the tables to stdout, and under them what was calibrated with what, and where.

        Args:
            losses: Whether to print a table of losses besides.
        """
        print_run(self, losses=losses)
