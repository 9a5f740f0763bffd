"""One task of `featcal calibrate`: its calibration samples and its test examples."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn

from fusion_bench_featcal.data.draws import evenly_spaced, sample_order
from fusion_bench_featcal.data.labels import are_unnamed, class_indices, sort_names
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.data.tables import parent_folder
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.results.advice import FEW_EXAMPLES

HELD_OUT = 5
"""Without test data, one example in this number is held out for evaluation."""
OTHER_TEXT = "other text"
"""Task of the general sentences in `other_text.jsonl`, which were written for this package."""


class Subset(NamedTuple):
    """Selected examples of a dataset.

    Attributes:
        option: The option with the dataset, for messages.
        location: Path or hub id of the dataset, with or without a split.
        dataset: The dataset.
        indices: Indices of the examples in it.
    """

    option: str
    location: str
    dataset: Any
    indices: list[int]

    @property
    def folder(self) -> Path:
        """The folder of the dataset's table, where relative paths in it start."""
        return parent_folder(self.location)


class Scorer(Protocol):
    """Test examples on which a model is scored."""

    def score(self, model: nn.Module) -> Score:
        """Score a model."""
        ...


@dataclass(frozen=True)
class Task:
    """One task's data.

    Attributes:
        batches: Calibration samples: an iterable of the model's inputs.
        samples: Number of calibration samples.
        scorer: Scores a model on the test examples, or None if there are none.
        notes: Sentences on the samples.
        has_repeats: Whether test examples repeat calibration samples.
        available: Number of test examples, of which some may not be scored.
    """

    batches: Iterable[Any]
    samples: int
    scorer: Scorer | None
    notes: Sequence[str] = ()
    has_repeats: bool = False
    available: int = 0


@dataclass(frozen=True)
class TaskData:
    """A task's data, divided into calibration samples and test examples.

    The samples are the same as those of `method=featcal`. Held-out examples come from the end of
    the same random order, so the two never overlap. Examples of --eval are spread over their
    dataset, because image folders are sorted by class.

    Attributes:
        task: The task.
        request: The request.
        samples: Calibration samples. For a task without samples, none, of the tests' dataset.
        tests: Test examples. Empty if nothing is scored.
        order: Indices of all examples of --data in random order.
        reason: Why nothing is scored, or None.
        notes: Sentences on test examples that repeat samples.
        has_repeats: Whether such examples are scored.
        available: Number of test examples, of which `tests` may have some.
    """

    task: str
    request: Request
    samples: Subset
    tests: Subset
    order: list[int]
    reason: str | None = None
    notes: Sequence[str] = ()
    has_repeats: bool = False
    available: int = 0

    @classmethod
    def open(
        cls, task: str, request: Request, open_dataset: Callable[[str, str, str], Any]
    ) -> "TaskData":
        """Open a task's data.

        Args:
            task: The task.
            request: The request.
            open_dataset: Returns a dataset. Its arguments are a location, a split and an option for
                messages.

        Raises:
            ValueError: If there are no examples, or too few for --strict.
        """

        def opened(field: str, location: str, split: str) -> Subset:
            option = f"--{field} {task}={location}"
            dataset = open_dataset(location, split, option)
            if not len(dataset):
                raise ValueError(f"{option} has no examples")
            return Subset(option, location, dataset, [])

        def open_tests() -> Subset:
            tests = opened("eval", request.eval[task], "test")
            return tests._replace(indices=evenly_spaced(len(tests.dataset), most))

        most = request.eval_rows
        if task not in request.data:
            tests = open_tests()
            available = len(tests.dataset)
            return cls(task, request, tests._replace(indices=[]), tests, [], available=available)
        data = opened("data", request.data[task], "train")
        order = sample_order(len(data.dataset), task, request.settings.seed)
        held_out = 0 if request.no_eval or task in request.eval else len(order) // HELD_OUT
        first_test = len(order) - min(most, held_out)
        most_samples = min(request.settings.samples_per_task, first_test)
        samples = data._replace(indices=order[:most_samples])
        tests = data._replace(indices=order[first_test:])
        available = held_out
        if task in request.eval and not request.no_eval:
            tests = open_tests()
            available = len(tests.dataset)
        if request.strict and not request.no_eval and len(tests.indices) < FEW_EXAMPLES:
            raise ValueError(
                f"--strict needs at least {FEW_EXAMPLES} test examples per task, but "
                f"{tests.option} leaves {len(tests.indices)}: give more with --eval {task}=PATH"
            )
        return cls(task, request, samples, tests, order, available=available)

    def unscored(self, reason: str) -> "TaskData":
        """Return the data without test examples. Held-out examples become samples."""
        order = self.order[: self.request.settings.samples_per_task]
        samples, tests = self.samples._replace(indices=order), self.tests._replace(indices=[])
        return replace(self, samples=samples, tests=tests, reason=reason)

    def without_repeats(
        self, sample_keys: Iterable[Hashable], test_keys: Iterable[Hashable]
    ) -> tuple["TaskData", list[int]]:
        """Leave out held-out examples that repeat a sample if enough others remain.

        Args:
            sample_keys: The content of each sample.
            test_keys: The content of each test example.

        Returns:
            The data, and the positions in `test_keys` of the test examples that remain.
        """
        read = {*sample_keys} if self.tests.indices else set[Hashable]()
        repeats = [content in read for content in test_keys]
        new = [position for position, is_repeat in enumerate(repeats) if not is_repeat]
        if len(new) == len(repeats):
            return self, new
        note = f"{sum(repeats)} of {pluralize(len(repeats), 'test example')} are also samples"
        if self.task in self.request.eval or len(new) < FEW_EXAMPLES:
            notes = [f"{self.task}: {note}, but are scored nevertheless"]
            return replace(self, notes=notes, has_repeats=True), [*range(len(repeats))]
        tests = self.tests._replace(indices=[self.tests.indices[n] for n in new])
        return replace(self, tests=tests, notes=[f"{self.task}: {note}, and are left out"]), new

    def opened(
        self,
        batches: Iterable[object],
        scorer: Scorer | None,
        columns: Iterable[str],
        notes: Sequence[str] = (),
        *,
        measure: str = "accuracy",
    ) -> Task:
        """Return the task with its batches and scorer.

        Args:
            batches: Calibration samples.
            scorer: Scores a model on the test examples, or None.
            columns: The columns that are read.
            notes: Further sentences on the data, without the task's name.
            measure: Description of the accuracy.
        """
        unscored = [f"not scored, because {self.reason}"] if self.reason else []
        task_notes = [f"{self.task}: {note}" for note in (*notes, *unscored)]
        texts = [self._sentence(columns, measure), *self.notes, *task_notes]
        count = len(self.samples.indices)
        return Task(batches, count, scorer, texts, self.has_repeats, self.available)

    def _sentence(self, columns: Iterable[str], measure: str) -> str:
        """Describe the samples, the columns, and the test examples."""
        task, request = self.task, self.request
        named = {column: name for name, column in request.columns_of(task).items()}
        read = ", ".join(f"{named[c]}={c}" if named.get(c, c) != c else c for c in columns)
        samples = "no samples"
        if task in request.data:
            count = pluralize(len(self.samples.indices), "sample")
            samples = f"{count} of {request.data[task]}{f' ({read})' * bool(read)}"
        description = f"{task}: {samples}"
        if request.no_eval or self.reason:
            return description
        if not self.tests.indices:
            return (
                f"{description}; not evaluated, because there are too few examples to hold any "
                "out (give some with --eval)"
            )
        source = "from --eval" if task in request.eval else "held out from --data"
        is_few = len(self.tests.indices) < FEW_EXAMPLES
        few = " (too few to compare, give more with --eval)" * is_few
        examples = pluralize(len(self.tests.indices), "example")
        return f"{description}; evaluated on {examples} {source}{few}: {measure}"


def head_class_indices(
    values: Sequence[object],
    names: Sequence[str] | None,
    classes: Sequence[str],
    row_name: Callable[[int], str],
    more_labels: Sequence[object] = (),
) -> tuple[list[int], str | None]:
    """Return the head's class index of each label, and a note on how it was found, or None.

    If the head has no names (LABEL_0, ...), the class names of the data are used in their order.

    Args:
        values: The labels: numbers or texts.
        names: The class names of the data in order, by default sorted, numbers by value.
        classes: The class names of the head.
        row_name: Returns the name of a label's row, for messages.
        more_labels: Labels of further rows of the same data.

    Raises:
        CalibrationError: As `class_indices`.
    """
    note, texts = None, {value for value in (*values, *more_labels) if isinstance(value, str)}
    names = names or sort_names(texts)
    if len(names) == len(classes) and are_unnamed(classes) and names != classes:
        order = ", ".join(names)
        note = f"its expert's head has no class names, so they are {order:.200} in this order"
        classes = names
    owner = " of the expert's head"
    indices = class_indices(values, classes, row_name, owner=owner, advice="")
    labels = [str(value).removesuffix(".0") for value in (*values, *more_labels)]
    pairs = zip(labels, indices, strict=False)
    # All labels are class indices, not names that are numbers, and none is 0.
    are_from_one = "0" not in labels and all(text == str(n) != classes[n] for text, n in pairs)
    if are_from_one and not note:
        first = min(indices)
        note = f"no label is 0, but classes are numbered from 0: {first} is {classes[first]!r}"
    return indices, note


def not_scored(values: Sequence[object], classes: Sequence[str]) -> str | None:
    """Return why labels cannot be compared with a head's classes, or None if they can."""
    if len(classes) == 1:
        return "its expert's head has one output and so cannot choose between classes"
    if values and all(isinstance(value, list | tuple) for value in values):
        return "its labels are lists, not one class each"
    return None
