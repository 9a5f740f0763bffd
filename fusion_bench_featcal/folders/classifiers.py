"""Tasks of text classifiers: each expert has a head of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.calibration_text import text_rows
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import (
    Score,
    Task,
    check_labels,
    classification_score,
    label_numbers,
    sentences,
    split_rows,
)
from fusion_bench_featcal.untrusted import shortened

_TEXT, _PAIR, _LABEL = "text", "text_pair", "label"


def open_classifier_task(
    task: str, request: Request, tokenizer: Any, classes: Sequence[str]
) -> Task:
    """Open a task's texts, rows with `text`, maybe `text_pair`, and `label` for evaluation.

    Args:
        task: The task.
        request: The request.
        tokenizer: Makes token ids.
        classes: Names of the classes of the head of the task's expert, by their numbers.

    Raises:
        ValueError: If there is no such data, or it has columns of other names.
    """
    place = f"--data {task}={request.data[task]}"
    rows = text_rows(load_texts(request.data[task]), place)
    chosen, held = split_rows(task, len(rows), request)
    encode = _Encoder(tokenizer, request.settings.max_length, request.settings.batch_size)
    batches = encode(rows, chosen, place)
    if request.evaluate and task in request.tests:
        place = f"--eval {task}={request.tests[task]}"
        rows = text_rows(load_texts(request.tests[task], "test"), place)
        held, notes = list(range(len(rows)))[: request.test_rows], []
    else:
        notes = sentences(len(held), task, request)
    tests = None
    if held:
        labels, guesses = _labels(rows, held, classes, place)
        notes += guesses
        tests = ClassifierTests(encode(rows, held, place), labels)
    length = max(batch["input_ids"].shape[1] for batch in batches)
    return Task(batches, len(chosen), length, tests, notes)


@dataclass(frozen=True)
class _Encoder:
    tokenizer: Any
    max_length: int | None
    batch_size: int

    def __call__(self, rows: Any, indices: list[int], place: str) -> list[dict[str, Tensor]]:
        """Token ids in batches, padded."""
        taken = [rows[index] for index in indices]
        for index, row in zip(indices, taken, strict=True):
            texts = [row.get(_TEXT), row.get(_PAIR, "")]
            if not all(isinstance(text, str) for text in texts) or not texts[0].strip():
                strange = {key: type(value).__name__ for key, value in sorted(row.items())}
                raise ValueError(
                    f"{place}, item {index}: a row of a classifier has text (and text_pair, and "
                    f"label); this one has {strange}"
                )
        limit = min(self.max_length or 512, self.tokenizer.model_max_length)
        batches = []
        for start in range(0, len(taken), self.batch_size):
            part = taken[start : start + self.batch_size]
            paired = _PAIR in part[0]
            pairs = [shortened(row[_PAIR], limit) for row in part] if paired else None
            encoded = self.tokenizer(
                [shortened(row[_TEXT], limit) for row in part],
                pairs,
                truncation=True,
                max_length=limit,
                padding=True,
                return_tensors="pt",
            )
            batches.append(dict(encoded))
        return batches


def _labels(
    rows: Any, indices: list[int], classes: Sequence[str], place: str
) -> tuple[Tensor, list[str]]:
    values: list[Any] = [rows[index].get(_LABEL) for index in indices]
    values = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
    if any(value is None for value in values):
        raise ValueError(f"{place}: rows need a label to be evaluated, or give --no-eval")
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return torch.tensor(check_labels(values, classes, place)), []
    names = sorted({str(value) for value in values})
    numbers, notes = label_numbers(names, classes, place)
    by_name = dict(zip(names, numbers, strict=True))
    return torch.tensor([by_name[str(value)] for value in values]), notes


@dataclass(frozen=True)
class ClassifierTests:
    """Test texts with labels, as numbers of the expert's head."""

    batches: list[dict[str, Tensor]]
    labels: Tensor

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        """Score a classifier."""
        device = next(model.parameters()).device
        logits = [
            model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits.cpu()
            for batch in self.batches
        ]
        return classification_score(torch.cat(logits), self.labels)
