"""One task of `featcal calibrate`: calibration samples and test samples."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusion_bench_featcal.data.draws import sample_order, spread
from fusion_bench_featcal.data.labels import are_unnamed, class_numbers
from fusion_bench_featcal.errors.plurals import counted
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

    def distinct_from(
        self, samples: "Part", task: str, request: Request, content: Callable[[Any, int], Any]
    ) -> tuple["Part", "Distinct"]:
        """Return the rows to score, without held-back ones that repeat a sample (`Distinct.of`).

        Args:
            samples: The calibration rows.
            task: The task.
            request: The request.
            content: Returns what is read of a row, given all rows and its number.
        """
        read = {content(samples.rows, number) for number in samples.indices if self.indices}
        repeated = [content(self.rows, number) in read for number in self.indices]
        distinct = Distinct.of(task, request, repeated)
        return self._replace(indices=[self.indices[n] for n in distinct.numbers]), distinct


@dataclass(frozen=True)
class Task:
    """One task's data.

    Attributes:
        batches: Calibration samples: an iterable of the model's inputs.
        samples: Number of calibration samples.
        tests: Test samples that score a model (`Tests`), or None.
        notes: Sentences on the samples.
        title: What the scores are, a share in percent and a loss.
        has_repeats: Whether test samples repeat calibration samples.
    """

    batches: Any
    samples: int
    tests: Any
    notes: Sequence[str] = ()
    title: str = "accuracy % (loss)"
    has_repeats: bool = False


def open_parts(
    task: str, request: Request, open_rows: Callable[[str, str, str], Any]
) -> tuple[Part, Part]:
    """Open a task's rows: for calibration, and for evaluation.

    Calibration rows are those that `method=featcal` draws. Held-back rows come from the end of the
    same random order, so the two never overlap. Rows of --eval are spread over their dataset,
    because image folders are sorted by class.

    Args:
        task: The task.
        request: The request.
        open_rows: Returns the rows of a location, a split and a name for messages.
    """
    option, settings = f"--data {task}={request.data[task]}", request.settings
    rows = open_rows(request.data[task], "train", option)
    available, requested = len(rows), settings.samples_per_task
    if available == 0:
        raise ValueError(f"{option} has no rows")
    order = sample_order(available, task, settings.seed)
    is_held_back = not request.no_eval and task not in request.eval
    held_back = min(request.eval_rows, available // HELD_BACK) if is_held_back else 0
    calibration = Part(option, rows, order[: min(requested, available - held_back)])
    tests = Part(option, rows, order[available - held_back :])
    if task in request.eval and not request.no_eval:
        option = f"--eval {task}={request.eval[task]}"
        rows = open_rows(request.eval[task], "test", option)
        if not len(rows):
            raise ValueError(f"{option} has no rows")
        tests = Part(option, rows, spread(len(rows), request.eval_rows))
    if request.strict and not request.no_eval and len(tests.indices) < FEW_ROWS:
        raise ValueError(
            f"--strict compares at least {FEW_ROWS} rows per task, and {option} leaves "
            f"{len(tests.indices)}: give more by --eval {task}=PATH"
        )
    return calibration, tests


class Distinct(NamedTuple):
    """Test rows that are scored, as far as they repeat calibration samples.

    Attributes:
        numbers: Numbers of the rows, as many as there are or those that repeat no sample.
        notes: A sentence if some repeat a sample.
        has_repeats: Whether such rows are scored.
    """

    numbers: list[int]
    notes: list[str]
    has_repeats: bool

    @classmethod
    def of(cls, task: str, request: Request, repeated: Sequence[bool]) -> "Distinct":
        """Leave out held-back rows that repeat a sample if enough others remain.

        Args:
            task: The task.
            request: The request. Rows of its --eval are scored as they are.
            repeated: Whether each test row repeats a calibration sample.
        """
        others = [number for number, repeats in enumerate(repeated) if not repeats]
        if len(others) == len(repeated):
            return cls(others, [], False)
        note = f"{task}: {sum(repeated)} of {counted(len(repeated), 'test row')} repeat samples"
        if task in request.eval or len(others) < FEW_ROWS:
            return cls([*range(len(repeated))], [f"{note}, and are scored all the same"], True)
        return cls(others, [f"{note}, and are left out"], False)


def sentence(
    task: str,
    request: Request,
    calibration: Part,
    tests: Part,
    columns: Iterable[str] = (),
    measure: str = "share of right answers",
) -> str:
    """Describe a task's samples, the columns to read, and the rows of the evaluation."""
    named = {column: part for part, column in request.columns_of(task).items()}
    read = ", ".join(f"{named[c]}={c}" if named.get(c, c) != c else c for c in columns)
    begin = f"{task}: {counted(len(calibration.indices), 'sample')} of {request.data[task]}"
    begin += f" ({read})" if read else ""
    if request.no_eval:
        return begin
    if not tests.indices:
        return f"{begin}; too few rows to hold any back, so it is not evaluated (--eval)"
    which = "of --eval" if task in request.eval else "of --data, held back"
    rows = counted(len(tests.indices), "row")
    return f"{begin}; evaluated on {rows} {which}: {measure}"


def head_numbers(
    values: Sequence[Any],
    names: Sequence[str] | None,
    classes: Sequence[str],
    at: Callable[[int], str],
    more_labels: Sequence[Any] = (),
) -> tuple[list[int], str]:
    """Return the head's number of each label, and a note on how they were found, or no text.

    If the head has no names (LABEL_0, ...), the data's own are used in their order.

    Args:
        values: The labels: numbers or texts.
        names: The data's class names in order, by default alphabetical.
        classes: The class names of the head.
        at: Returns the name of a label's row, for messages.
        more_labels: Labels of further rows of the same data.

    Raises:
        CalibrationError: As `class_numbers`.
    """
    note, texts = "", {value for value in (*values, *more_labels) if isinstance(value, str)}
    names = names or sorted(texts)
    if len(names) == len(classes) and are_unnamed(classes) and names != classes:
        order = ", ".join(names)
        note = f"its expert's head has no names of classes, so they are {order:.200} in this order"
        classes = names
    owner = " of the expert's head"
    numbers = class_numbers(values, classes, at, owner=owner, advice="")
    if not note and _count_from_one(values, numbers, classes, more_labels):
        first = min(numbers)
        note = f"no label is 0, and labels count from 0: {first} is {classes[first]!r}"
    return numbers, note


def _count_from_one(
    values: Sequence[Any],
    numbers: Sequence[int],
    classes: Sequence[str],
    more_labels: Sequence[Any],
) -> bool:
    """Return whether labels are numbers of classes, not of their names, and none is 0."""
    texts = [str(value).removesuffix(".0") for value in (*values, *more_labels)]
    pairs = zip(texts, numbers, strict=False)
    return "0" not in texts and all(text == str(n) != classes[n] for text, n in pairs)


def not_scored(values: Sequence[Any], classes: Sequence[str]) -> str:
    """Return why labels cannot be compared with a head's classes, or an empty text."""
    if len(classes) == 1:
        return "its expert's head has one output, which is no choice between classes"
    if values and all(isinstance(value, list | tuple) for value in values):
        return "its labels are lists, not one class each"
    return ""
