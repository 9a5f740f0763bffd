"""One task of `featcal calibrate`: calibration samples, test samples, and scores of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.plurals import counted

HELD_BACK = 5
"""Without test data one row of so many is held back for evaluation."""


class Score(NamedTuple):
    """Scores of a task's test samples.

    Attributes:
        accuracy: Share of correct samples or, of long or free texts, of correct tokens, 0 to 1.
        loss: Mean cross-entropy of the targets.
        correct: Which samples are correct, bool `[samples]`; None where accuracy counts tokens.
    """

    accuracy: float
    loss: float
    correct: Tensor | None


class Tests(Protocol):
    """A task's test samples."""

    def score(self, model: nn.Module) -> Score:
        """Score a model."""
        ...


@dataclass(frozen=True)
class Task:
    """One task's data.

    Attributes:
        batches: Calibration samples: an iterable of the model's inputs.
        samples: Number of calibration samples.
        length: Tokens of the longest text; 0 of images.
        tests: Test samples; None: there are none.
        notes: Sentences on what was decided.
    """

    batches: Any
    samples: int
    length: int
    tests: Tests | None
    notes: Sequence[str] = field(default_factory=tuple)


def split_rows(task: str, available: int, request: Request) -> tuple[list[int], list[int]]:
    """Choose a task's rows: for calibration, and those that are held back for evaluation.

    Calibration rows are the ones that `method=featcal` draws; rows are held back from the end of
    the same order, so that the two never overlap.

    Raises:
        ValueError: If the task has no rows.
    """
    if available == 0:
        raise ValueError(f"--data {task}={request.data[task]} has no rows")
    order = sample_order(available, task, request.settings.seed)
    wanted = request.settings.samples_per_task
    if not request.evaluate or task in request.tests:
        return order[:wanted], []
    held = min(request.test_rows, available // HELD_BACK)
    return order[: min(wanted, available - held)], order[available - held :]


def sentences(held: int, task: str, request: Request) -> list[str]:
    """Say on how many held-back rows a task is evaluated, where it has no test data."""
    if held:
        return [f"{task}: evaluated on {counted(held, 'row of --data')}, held back"]
    if request.evaluate and task not in request.tests:
        return [f"{task}: too few rows to hold any back, so it is not evaluated (--eval)"]
    return []


def classification_score(logits: Tensor, labels: Tensor) -> Score:
    """Score class logits, `[samples, classes]`, against labels `[samples]`."""
    loss = torch.nn.functional.cross_entropy(logits.float(), labels)
    correct = (logits.argmax(dim=-1) == labels).cpu()
    return Score(correct.double().mean().item(), loss.item(), correct)


def label_numbers(names: Sequence[Any], label2id: Mapping[str, int], place: str) -> list[int]:
    """Number in a model's head of each class name of a data set.

    Raises:
        ValueError: If the head has no class of that name.
    """
    by_name = {str(name).casefold(): number for name, number in label2id.items()}
    numbers = [by_name.get(str(name).casefold()) for name in names]
    known = [number for number in numbers if number is not None]
    if len(known) == len(numbers):
        return known
    # heads that were saved without names: LABEL_0, LABEL_1, ...
    unnamed = all(str(name).startswith("LABEL_") for name in label2id)
    if unnamed and len(names) == len(label2id):
        return list(range(len(names)))
    missing = next(name for name, number in zip(names, numbers, strict=True) if number is None)
    raise ValueError(
        f"{place}: the expert's head has no class {missing!r}; it has {', '.join(label2id)}"
    )
