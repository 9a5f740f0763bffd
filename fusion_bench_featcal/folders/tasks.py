"""One task of `featcal calibrate`: calibration samples, test samples, and scores of a model."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.errors.plurals import counted
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.modules.models import device_of

HELD_BACK = 5
"""Without test data, one row in this number is held back for evaluation."""
SHOWN_NAMES = 12
"""Largest number of class names in a note."""

TargetKind = Literal["class", "answer", "text"]
"""Kind of targets: classes, texts that answer a prompt, or whole texts."""


class Score(NamedTuple):
    """Scores of a task's test samples.

    Attributes:
        accuracy: Share of correct samples or, for long or free texts, of correct tokens, 0 to 1.
        losses: Cross-entropy of each sample's target, float64 `[samples]`.
        correct: Whether each sample is correct, bool `[samples]`. None if accuracy counts tokens.
        choices: Number of classes or tokens that the target is chosen from.
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
    """Rows of a dataset for one purpose.

    Attributes:
        option: The option with the dataset, for messages.
        rows: The dataset.
        indices: Numbers of its rows.
    """

    option: str
    rows: Any
    indices: list[int]


@dataclass(frozen=True)
class Task:
    """One task's data.

    Attributes:
        batches: Calibration samples: an iterable of the model's inputs.
        samples: Number of calibration samples.
        length: Tokens of the longest text, or 0 for images.
        tests: Test samples, or None.
        notes: Sentences on the samples, then on automatic decisions.
    """

    batches: Any
    samples: int
    length: int
    tests: Tests | None
    notes: Sequence[str] = ()


def open_parts(
    task: str, request: Request, open_rows: Callable[[str, str, str], Any], *, spread: bool = False
) -> tuple[Part, Part]:
    """Open a task's rows: for calibration, and for evaluation.

    Calibration rows are those that `method=featcal` draws. Held-back rows come from the end of the
    same random order, so the two never overlap.

    Args:
        task: The task.
        request: The request.
        open_rows: Returns the rows of a location, a split and a name for messages.
        spread: Whether test rows are spread over their dataset. Image folders are sorted by class.
    """
    option, settings = f"--data {task}={request.data[task]}", request.settings
    rows = open_rows(request.data[task], "train", option)
    available, requested = len(rows), settings.samples_per_task
    if available == 0:
        raise ValueError(f"{option} has no rows")
    order = sample_order(available, task, settings.seed)
    if request.no_eval:
        return Part(option, rows, order[:requested]), Part(option, rows, [])
    if task not in request.eval:
        held_back = min(request.eval_rows, available // HELD_BACK)
        calibration = Part(option, rows, order[: min(requested, available - held_back)])
        return calibration, Part(option, rows, order[available - held_back :])
    calibration = Part(option, rows, order[:requested])
    option = f"--eval {task}={request.eval[task]}"
    rows = open_rows(request.eval[task], "test", option)
    most = min(request.eval_rows, len(rows))
    step = len(rows) if spread else most
    return calibration, Part(option, rows, [number * step // most for number in range(most)])


def sentence(
    task: str,
    request: Request,
    calibration: Part,
    tests: Part,
    columns: Iterable[str] = (),
    measure: str = "right answers",
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
    return f"{begin}; evaluated on {rows} {which}: share of {measure}"


def class_logits(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the class logits of a model with a head."""
    return model(**batch).logits


@dataclass(frozen=True)
class LabelTests:
    """Test samples with labels, which are numbers of a head's classes.

    Attributes:
        batches: The model's inputs.
        labels: The labels, `[samples]`.
        logits: Returns class logits of a model for a batch.
    """

    batches: Iterable[Mapping[str, Tensor]]
    labels: Tensor
    logits: Callable[[nn.Module, Mapping[str, Tensor]], Tensor] = class_logits

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        """Score a model."""
        device, rows = device_of(model), []
        for batch in self.batches:
            moved = {name: tensor.to(device) for name, tensor in batch.items()}
            if "pixel_values" in moved:
                dtype = next(model.parameters()).dtype
                moved["pixel_values"] = moved["pixel_values"].to(dtype)
            rows.append(self.logits(model, moved).cpu())
        logits = torch.cat(rows)
        losses = F.cross_entropy(logits.float(), self.labels, reduction="none").double()
        correct = logits.argmax(dim=-1) == self.labels
        return Score(correct.double().mean().item(), losses, correct, logits.shape[-1], "class")


def label_numbers(
    names: Sequence[Any], classes: Sequence[str], option: str
) -> tuple[list[int], list[str]]:
    """Return the head's number of each class name of a dataset, and sentences on a guess.

    Names are the head's names, ignoring case, or numbers. If the head has no names (LABEL_0, ...)
    but as many classes, the data's names are used in alphabetical order, or by number if they only
    differ in a number (class_2, class_10).
    """
    texts = [str(name) for name in names]
    exact, folded = _numbered(classes), _numbered([name.casefold() for name in classes])
    numbers = [exact.get(text, folded.get(text.casefold())) for text in texts]
    missing = [text for text, number in zip(texts, numbers, strict=True) if number is None]
    if not missing:
        return [number for number in numbers if number is not None], []
    if all(text.isdecimal() for text in texts):
        return check_labels([int(text) for text in texts], classes, option), []
    if all(name.startswith("LABEL_") for name in classes) and len(texts) == len(classes):
        ordered = list(texts)
        if len({re.sub(r"\d+", "", text) for text in texts}) == 1:
            ordered.sort(key=lambda text: [int(number) for number in re.findall(r"\d+", text)])
        pairs = _listed([f"{text}={number}" for number, text in enumerate(ordered)])
        note = f"{option}: the expert's head has no class names, the data's are taken as {pairs}"
        return [ordered.index(text) for text in texts], [note]
    count = "several classes" if missing[0] in classes else "no class"
    raise ValueError(
        f"{option}: the expert's head has {count} {missing[0]!r}; it has {_listed(classes)}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")


def _numbered(names: Sequence[str]) -> dict[str, int]:
    """Return the number of each name that only one class has."""
    return {name: number for number, name in enumerate(names) if names.count(name) == 1}


def check_labels(labels: list[int], classes: Sized, option: str) -> list[int]:
    """Return labels that are numbers of a head's classes."""
    for label in labels:
        if not 0 <= label < len(classes):
            raise ValueError(
                f"{option}: label {label}, but the expert's head has {len(classes)} classes, from 0"
            )
    return labels
