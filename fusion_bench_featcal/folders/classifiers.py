"""Tasks of text classifiers: each expert has a head of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.folders.columns import open_texts
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import (
    Part,
    Score,
    Task,
    check_labels,
    classification_score,
    label_numbers,
    open_parts,
    sentence,
)

_COLUMNS = _TEXT, _PAIR, _LABEL = "text", "text_pair", "label"


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
    open_rows = partial(open_texts, columns=request.columns_of(task), names=_COLUMNS)
    used, held = open_parts(task, request, open_rows)
    encode = _Encoder(tokenizer, request.settings.max_length, request.settings.batch_size)
    batches = encode(used)
    notes, tests = [sentence(task, request, used, held)], None
    if held.indices:
        labels, guesses = _labels(held, classes)
        notes += guesses
        tests = ClassifierTests(encode(held), labels)
    length = max(batch["input_ids"].shape[1] for batch in batches)
    return Task(batches, len(used.indices), length, tests, notes)


@dataclass(frozen=True)
class _Encoder:
    tokenizer: Any
    max_length: int | None
    batch_size: int

    def __call__(self, part: Part) -> list[dict[str, Tensor]]:
        """Token ids in batches, padded."""
        place, taken = part.place, [part.rows[index] for index in part.indices]
        for index, row in zip(part.indices, taken, strict=True):
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
            batch = taken[start : start + self.batch_size]
            paired = _PAIR in batch[0]
            pairs = [row[_PAIR] for row in batch] if paired else None
            encoded = self.tokenizer(
                [row[_TEXT] for row in batch],
                pairs,
                truncation=True,
                max_length=limit,
                padding=True,
                return_tensors="pt",
            )
            batches.append(dict(encoded))
        return batches


def _labels(part: Part, classes: Sequence[str]) -> tuple[Tensor, list[str]]:
    place = part.place
    values: list[Any] = [part.rows[index].get(_LABEL) for index in part.indices]
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
