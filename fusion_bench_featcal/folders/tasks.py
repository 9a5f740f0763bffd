"""One task of `featcal calibrate`: calibration samples, test samples, and scores of a model."""

import re
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.plurals import counted

HELD_BACK = 5
"""Without test data one row of so many is held back for evaluation."""
SHOWN_NAMES = 12
"""Class names that a note lists."""


TargetKind = Literal["class", "answer", "text"]
"""Kind of targets: classes, texts that answer a prompt, or whole texts."""


class Score(NamedTuple):
    """Scores of a task's test samples.

    Attributes:
        accuracy: Share of correct samples or, of long or free texts, of correct tokens, 0 to 1.
        losses: Cross-entropy of each sample's target, float64 `[samples]`.
        correct: Which samples are correct, bool `[samples]`; None where accuracy counts tokens.
        choices: Number of classes or tokens of which the target is one.
        kind: Kind of the targets.
    """

    accuracy: float
    losses: Tensor
    correct: Tensor | None
    choices: int
    kind: TargetKind

    @property
    def loss(self) -> float:
        """Mean loss."""
        return self.losses.mean().item()


class Tests(Protocol):
    """A task's test samples."""

    def score(self, model: nn.Module) -> Score:
        """Score a model."""
        ...


class Part(NamedTuple):
    """Rows of a data set that are used for one purpose.

    Attributes:
        place: The option with the data set, for messages.
        rows: The data set.
        indices: Numbers of its rows.
    """

    place: str
    rows: Any
    indices: list[int]


@dataclass(frozen=True)
class Task:
    """One task's data.

    Attributes:
        batches: Calibration samples: an iterable of the model's inputs.
        samples: Number of calibration samples.
        length: Tokens of the longest text; 0 of images.
        tests: Test samples; None: there are none.
        notes: Sentences: first on the samples, then on what was decided.
    """

    batches: Any
    samples: int
    length: int
    tests: Tests | None
    notes: Sequence[str] = field(default_factory=tuple)


def open_parts(
    task: str, request: Request, open_rows: Callable[[str, str, str], Any], *, spread: bool = False
) -> tuple[Part, Part]:
    """Open a task's rows: for calibration, and for evaluation.

    Calibration rows are the ones that `method=featcal` draws; rows are held back from the end of
    the same order, so that the two never overlap.

    Args:
        task: The task.
        request: The request.
        open_rows: Returns the rows of a location, a split and a name for messages.
        spread: Whether test rows are spread over their data set: images lie in it by classes.

    Raises:
        ValueError: If the task has no rows.
    """
    place, seed = f"--data {task}={request.data[task]}", request.settings.seed
    rows = open_rows(request.data[task], "train", place)
    available, wanted = len(rows), request.settings.samples_per_task
    if available == 0:
        raise ValueError(f"{place} has no rows")
    order = sample_order(available, task, seed)
    if request.no_eval:
        return Part(place, rows, order[:wanted]), Part(place, rows, [])
    if task not in request.eval:
        held = min(request.eval_rows, available // HELD_BACK)
        calibration = Part(place, rows, order[: min(wanted, available - held)])
        return calibration, Part(place, rows, order[available - held :])
    calibration = Part(place, rows, order[:wanted])
    place = f"--eval {task}={request.eval[task]}"
    rows = open_rows(request.eval[task], "test", place)
    most = min(request.eval_rows, len(rows))
    step = len(rows) if spread else most
    return calibration, Part(place, rows, [number * step // most for number in range(most)])


def sentence(
    task: str,
    request: Request,
    calibration: Part,
    tests: Part,
    measure: str = "right answers",
) -> str:
    """Say what a task's samples are, and on how many rows and how it is evaluated."""
    begin = f"{task}: {counted(len(calibration.indices), 'sample')} of {request.data[task]}"
    if request.no_eval:
        return begin
    if not tests.indices:
        return f"{begin}; too few rows to hold any back, so it is not evaluated (--eval)"
    which = "of --eval" if task in request.eval else "of --data, held back"
    rows = counted(len(tests.indices), "row")
    return f"{begin}; evaluated on {rows} {which}: share of {measure}"


def classification_score(logits: Tensor, labels: Tensor) -> Score:
    """Score class logits, `[samples, classes]`, against labels `[samples]`."""
    losses = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none").double()
    correct = (logits.argmax(dim=-1) == labels).cpu()
    return Score(correct.double().mean().item(), losses, correct, logits.shape[-1], "class")


def label_numbers(
    names: Sequence[Any], classes: Sequence[str], place: str
) -> tuple[list[int], list[str]]:
    """Number in a model's head of each class name of a data set, and sentences on a guess.

    Names are those of the head, in any case, or numbers. If the head has none (LABEL_0, ...), it
    has the data's in their order, if there are as many: that of the number, where the names differ
    in a number only (class_2, class_10).

    Raises:
        ValueError: If the head has no class of that name, or several.
    """
    texts = [str(name) for name in names]
    exact, folded = _numbered(classes), _numbered([name.casefold() for name in classes])
    numbers = [exact.get(text, folded.get(text.casefold())) for text in texts]
    if None not in numbers:
        return [number for number in numbers if number is not None], []
    if all(text.isdecimal() for text in texts):
        return check_labels([int(text) for text in texts], classes, place), []
    unnamed = all(name.startswith("LABEL_") for name in classes)
    if unnamed and len(texts) == len(classes):
        ordered = list(texts)
        if len({re.sub(r"\d+", "", text) for text in texts}) == 1:
            ordered.sort(key=lambda text: [int(number) for number in re.findall(r"\d+", text)])
        pairs = [f"{text}={number}" for number, text in enumerate(ordered)]
        listed = ", ".join(pairs[:SHOWN_NAMES]) + (", ..." if len(pairs) > SHOWN_NAMES else "")
        note = f"{place}: the expert's head has no class names, the data's are taken as {listed}"
        return [ordered.index(text) for text in texts], [note]
    missing = texts[numbers.index(None)]
    count = "several classes" if missing in classes else "no class"
    listed = ", ".join(classes[:SHOWN_NAMES]) + (", ..." if len(classes) > SHOWN_NAMES else "")
    raise ValueError(f"{place}: the expert's head has {count} {missing!r}; it has {listed}")


def _numbered(names: Sequence[str]) -> dict[str, int]:
    """Number of each name that only one class has."""
    return {name: number for number, name in enumerate(names) if names.count(name) == 1}


def check_labels(labels: list[int], classes: Sized, place: str) -> list[int]:
    """Return labels that are numbers of a head's classes.

    Raises:
        ValueError: If the head has no class of that number.
    """
    strange = next((label for label in labels if not 0 <= label < len(classes)), None)
    if strange is not None:
        raise ValueError(
            f"{place}: label {strange}, but the expert's head has {len(classes)} classes, from 0"
        )
    return labels
