"""One task of `featcal calibrate`: calibration samples and test samples."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from torch import nn

from fusion_bench_featcal.data.draws import evenly_spaced, sample_order
from fusion_bench_featcal.data.labels import are_unnamed, class_indices
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.folders.request import Request

HELD_BACK = 5
"""Without test data, one row in this number is held back for evaluation."""
FEW_ROWS = 5
"""Number of evaluated rows below which a task is not compared."""


class Part(NamedTuple):
    """Rows of a dataset for one purpose.

    Attributes:
        option: The option with the dataset, for messages.
        rows: The dataset.
        indices: Numbers of its rows.
    """

    option: str
    rows: Any
    indices: list[int]

    def of(self, indices: list[int]) -> "Part":
        """Return other rows of the same dataset."""
        return self._replace(indices=indices)


class Scorer(Protocol):
    """Test samples that score a model."""

    def score(self, model: nn.Module) -> Score:
        """Score a model."""
        ...


@dataclass(frozen=True)
class Task:
    """One task's data.

    Attributes:
        batches: Calibration samples: an iterable of the model's inputs.
        samples: Number of calibration samples.
        tests: Test samples, or None.
        notes: Sentences on the samples.
        title: What the scores are, a share in percent and a loss.
        has_repeats: Whether test samples repeat calibration samples.
    """

    batches: Iterable[Any]
    samples: int
    tests: Scorer | None
    notes: Sequence[str] = ()
    title: str = "accuracy % (loss)"
    has_repeats: bool = False


@dataclass(frozen=True)
class TaskRows:
    """A task's rows, divided into calibration samples and test rows.

    Calibration rows are those that `method=featcal` draws. Held-back rows come from the end of the
    same random order, so the two never overlap. Rows of --eval are spread over their dataset,
    because image folders are sorted by class.

    Attributes:
        task: The task.
        request: The request.
        samples: Calibration rows.
        tests: Test rows, none if nothing is scored.
        order: Numbers of all rows of --data in random order.
        reason: Why nothing is scored, or an empty text.
        notes: Sentences on test rows that repeat samples.
        has_repeats: Whether such rows are scored.
    """

    task: str
    request: Request
    samples: Part
    tests: Part
    order: list[int]
    reason: str = ""
    notes: Sequence[str] = ()
    has_repeats: bool = False

    @classmethod
    def open(
        cls, task: str, request: Request, open_rows: Callable[[str, str, str], Any]
    ) -> "TaskRows":
        """Open a task's rows.

        Args:
            task: The task.
            request: The request.
            open_rows: Returns the rows of a location, a split and a name for messages.

        Raises:
            ValueError: If there are no rows, or too few for --strict.
        """

        def opened(field: str, location: str, split: str) -> Part:
            option = f"--{field} {task}={location}"
            rows = open_rows(location, split, option)
            if not len(rows):
                raise ValueError(f"{option} has no rows")
            return Part(option, rows, [])

        data, most = opened("data", request.data[task], "train"), request.eval_rows
        order = sample_order(len(data.rows), task, request.settings.seed)
        held_back = 0 if request.no_eval or task in request.eval else len(order) // HELD_BACK
        first_test = len(order) - min(most, held_back)
        samples = data.of(order[: min(request.settings.samples_per_task, first_test)])
        tests = data.of(order[first_test:])
        if task in request.eval and not request.no_eval:
            tests = opened("eval", request.eval[task], "test")
            tests = tests.of(evenly_spaced(len(tests.rows), most))
        if request.strict and not request.no_eval and len(tests.indices) < FEW_ROWS:
            raise ValueError(
                f"--strict compares at least {FEW_ROWS} rows per task, and {tests.option} leaves "
                f"{len(tests.indices)}: give more by --eval {task}=PATH"
            )
        return cls(task, request, samples, tests, order)

    def unscored(self, reason: str) -> "TaskRows":
        """Return the rows without tests. Those that were held back become samples."""
        samples = self.samples.of(self.order[: self.request.settings.samples_per_task])
        return replace(self, samples=samples, tests=self.tests.of([]), reason=reason)

    def without_repeats(
        self, sample_keys: Iterable[Hashable], test_keys: Iterable[Hashable]
    ) -> tuple["TaskRows", list[int]]:
        """Leave out held-back rows that repeat a sample if enough others remain.

        Args:
            sample_keys: What is read of each sample.
            test_keys: What is read of each test row.

        Returns:
            The rows, and the places of those test rows among the former ones that remain.
        """
        read = {*sample_keys} if self.tests.indices else set[Hashable]()
        repeats = [content in read for content in test_keys]
        new = [place for place, is_repeat in enumerate(repeats) if not is_repeat]
        if len(new) == len(repeats):
            return self, new
        note = f"{sum(repeats)} of {pluralize(len(repeats), 'test row')} repeat samples"
        if self.task in self.request.eval or len(new) < FEW_ROWS:
            notes = [f"{self.task}: {note}, and are scored all the same"]
            return replace(self, notes=notes, has_repeats=True), [*range(len(repeats))]
        tests = self.tests.of([self.tests.indices[place] for place in new])
        return replace(self, tests=tests, notes=[f"{self.task}: {note}, and are left out"]), new

    def opened(
        self,
        batches: Iterable[object],
        tests: Scorer | None,
        columns: Iterable[str],
        notes: Sequence[str] = (),
        *,
        measure: str = "share of right answers",
        title: str = Task.title,
    ) -> Task:
        """Return the task with its batches and tests.

        Args:
            batches: Calibration samples.
            tests: Test samples, or None.
            columns: The columns that are read.
            notes: Further sentences on the rows, without the task's name.
            measure: What is scored.
            title: What the scores are.
        """
        unscored = [f"not scored, as {self.reason}"] if self.reason else []
        task_notes = [f"{self.task}: {note}" for note in (*notes, *unscored)]
        texts = [self._sentence(columns, measure), *self.notes, *task_notes]
        return Task(batches, len(self.samples.indices), tests, texts, title, self.has_repeats)

    def _sentence(self, columns: Iterable[str], measure: str) -> str:
        """Describe the samples, the columns, and the rows of the evaluation."""
        task, request = self.task, self.request
        named = {column: name for name, column in request.columns_of(task).items()}
        read = ", ".join(f"{named[c]}={c}" if named.get(c, c) != c else c for c in columns)
        begin = f"{task}: {pluralize(len(self.samples.indices), 'sample')} of {request.data[task]}"
        begin += f" ({read})" if read else ""
        if request.no_eval or self.reason:
            return begin
        if not self.tests.indices:
            return f"{begin}; too few rows to hold any back, so it is not evaluated (--eval)"
        source = "of --eval" if task in request.eval else "of --data, held back"
        few = " (too few to compare, more by --eval)" * (len(self.tests.indices) < FEW_ROWS)
        rows = pluralize(len(self.tests.indices), "row")
        return f"{begin}; evaluated on {rows} {source}{few}: {measure}"


def head_numbers(
    values: Sequence[object],
    names: Sequence[str] | None,
    classes: Sequence[str],
    row_name: Callable[[int], str],
    more_labels: Sequence[object] = (),
) -> tuple[list[int], str]:
    """Return the head's number of each label, and a note on how they were found, or no text.

    If the head has no names (LABEL_0, ...), the data's own are used in their order.

    Args:
        values: The labels: numbers or texts.
        names: The data's class names in order, by default alphabetical.
        classes: The class names of the head.
        row_name: Returns the name of a label's row, for messages.
        more_labels: Labels of further rows of the same data.

    Raises:
        CalibrationError: As `class_indices`.
    """
    note, texts = "", {value for value in (*values, *more_labels) if isinstance(value, str)}
    names = names or sorted(texts)
    if len(names) == len(classes) and are_unnamed(classes) and names != classes:
        order = ", ".join(names)
        note = f"its expert's head has no names of classes, so they are {order:.200} in this order"
        classes = names
    owner = " of the expert's head"
    numbers = class_indices(values, classes, row_name, owner=owner, advice="")
    labels = [str(value).removesuffix(".0") for value in (*values, *more_labels)]
    pairs = zip(labels, numbers, strict=False)
    # They are numbers of classes, not of their names, and none is 0.
    are_from_one = "0" not in labels and all(text == str(n) != classes[n] for text, n in pairs)
    if are_from_one and not note:
        first = min(numbers)
        note = f"no label is 0, and labels count from 0: {first} is {classes[first]!r}"
    return numbers, note


def not_scored(values: Sequence[object], classes: Sequence[str]) -> str:
    """Return why labels cannot be compared with a head's classes, or an empty text."""
    if len(classes) == 1:
        return "its expert's head has one output, which is no choice between classes"
    if values and all(isinstance(value, list | tuple) for value in values):
        return "its labels are lists, not one class each"
    return ""
