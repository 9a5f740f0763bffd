"""Text tasks: for language models (prompts with targets, chats, texts) and for classifiers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion_bench_featcal.data.loading import naming_setting
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.data.text_batches import TextBatches, text_rows
from fusion_bench_featcal.data.text_formats import CHATS, FORMATS, TARGETS, lacks_answer
from fusion_bench_featcal.data.text_samples import IGNORED, TextEncoder
from fusion_bench_featcal.errors.nearest_names import nearest_hint, refuse_unknown
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import (
    LabelTests,
    Part,
    Score,
    Task,
    check_labels,
    label_numbers,
    open_parts,
    sentence,
)
from fusion_bench_featcal.modules.models import device_of

LONG = 16
"""Median number of target tokens above which accuracy counts tokens, not whole answers."""
_OF_MODELS = ("prompt", "target", "messages", "text")
_OF_CLASSIFIERS = _TEXT, _PAIR, _LABEL = "text", "text_pair", "label"


def open_texts(
    location: str,
    split: str,
    option: str,
    *,
    columns: Mapping[str, str],
    names: Sequence[str],
    usual: Sequence[str],
) -> Any:
    """Open a table of texts, optionally with renamed columns.

    Args:
        location: A table, a saved dataset or a hub dataset, as for `load_texts`.
        split: The split, if there are several.
        option: The option that names it, for messages.
        columns: Standard name of a column -> its name in the table. If there are any, only these
            columns are read. Standard columns are also read if `names` equals `usual`.
        names: Standard names that are allowed.
        usual: Standard columns, one of which is needed if `columns` is empty.
    """
    with naming_setting(option):
        rows = text_rows(load_texts(location, split), option)
    refuse_unknown(columns, names, f"{option}: --columns ")
    available = rows.column_names
    for column in columns.values():
        if column not in available:
            raise ValueError(
                f"{option} has no column {column!r}{nearest_hint(column, available)}; it has "
                f"{', '.join(available)}"
            )
    if columns:
        usual_columns = {n: n for n in names if names == usual and n in available}
        by_column = {column: name for name, column in {**usual_columns, **columns}.items()}
        return rows.select_columns(list(by_column)).rename_columns(by_column)
    if not {*available} & {*usual}:
        pairs = ",".join(f"{n}={c}" for n, c in list(zip(names, available, strict=False))[:2])
        raise ValueError(
            f"{option} has the columns {', '.join(available)}, of which none is usual: say what "
            f"they hold, such as --columns {pairs}"
        )
    return rows


def open_language_task(
    task: str, request: Request, encoder: TextEncoder, load_expert: Callable[[], nn.Module]
) -> Task:
    """Open a task's texts, and read the selected rows.

    Args:
        task: The task.
        request: The request.
        encoder: Converts texts to token ids.
        load_expert: Loads the task's expert, if it generates the targets.
    """
    columns = request.columns_of(task)
    open_rows = partial(open_texts, columns=columns, names=_OF_MODELS, usual=FORMATS)
    calibration_part, test_part = open_parts(task, request, open_rows)

    def batches(part: Part) -> TextBatches:
        settings = request.settings
        names = [(index, f"{part.option}, item {index}") for index in part.indices]
        lacking = [name for index, name in names if lacks_answer(part.rows[index], name)]
        if 0 < len(lacking) < len(names):
            raise ValueError(
                f"{lacking[0]}: no target, as in {len(lacking)} of {len(names)} rows. Leave "
                "these rows out, or leave out all targets, so that the expert writes them"
            )
        if lacking:
            settings = settings.replace(calibration_targets="generated")
        return TextBatches(*part, settings, encoder, load_expert, request.device)

    calibration = batches(calibration_part)
    length = max(calibration.lengths())
    tests = LanguageTests(batches(test_part)) if test_part.indices else None
    measure = "" if tests is None else tests.measure()
    read = dict.fromkeys(
        name for i in calibration_part.indices for name in _columns_read(calibration_part.rows[i])
    )
    columns_read = [columns.get(name, name) for name in read]
    notes = [sentence(task, request, calibration_part, test_part, columns_read, measure)]
    if calibration.settings.calibration_targets == "generated":
        notes.append(f"{task}: no targets in --data, so its expert writes them")
    return Task(calibration, len(calibration_part.indices), length, tests, notes)


def _columns_read(row: Mapping[str, Any]) -> list[str]:
    """Return the columns that are read from a row, by the first format that it fits."""
    filled = [name for name, value in row.items() if value is not None]
    form = next((name for name in FORMATS if name in filled), "")
    if form in (*CHATS, "text"):
        return [form]
    if form == "input_ids":
        return [name for name in ("input_ids", "attention_mask", "labels") if name in filled]
    contexts = [name for name in ("input", "context") if form == "instruction" and row.get(name)]
    return [form, *contexts[:1], *[name for name in TARGETS if name in filled][:1]]


@dataclass
class LanguageTests:
    """Test texts, scored by the probability of their targets.

    A target counts as answered if each of its tokens is the model's first choice given the tokens
    before it, because greedy search would then generate it.
    """

    batches: TextBatches

    def measure(self) -> str:
        """Read all texts, and describe the unit of the accuracy."""
        self.batches.lengths()
        written = self.batches.settings.calibration_targets == "generated"
        whose = " that its expert writes" if written else ""
        return f"{'tokens' if self._counts_tokens else 'whole answers'}{whose} that are right"

    @cached_property
    def _counts_tokens(self) -> bool:
        """Return whether targets are too long for an exact answer, or are free text."""
        batches = self.batches
        if batches.settings.calibration_targets == "generated":
            return True
        labels = [batches.encoder.sample(batches.rows[i], "").labels for i in batches.indices]
        lengths = [sum(token != IGNORED for token in row) if row else LONG + 1 for row in labels]
        return median(lengths) > LONG

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        """Score a model by its mean loss per token, averaged over texts, and by accuracy."""
        device = device_of(model)
        losses, tokens, exact = [], [0, 0], []
        choices, kind = 0, "text"
        for batch in self.batches.checked(model):
            moved = {name: tensor.to(device) for name, tensor in batch.items()}
            logits, labels = targets_of(model, moved)
            choices, kind = logits.shape[-1], "answer" if "labels" in batch else "text"
            counted = labels != IGNORED
            loss = F.cross_entropy(
                logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
            )
            losses.append(loss.sum(dim=1) / counted.sum(dim=1).clamp(min=1))
            right = (logits.argmax(dim=-1) == labels) | ~counted
            tokens[0] += int((right & counted).sum())
            tokens[1] += int(counted.sum())
            exact.append(right.all(dim=1))
        correct = None if self._counts_tokens else torch.cat(exact).cpu()
        share = tokens[0] / max(tokens[1], 1) if correct is None else correct.double().mean().item()
        return Score(share, torch.cat(losses).double().cpu(), correct, choices, kind)


def targets_of(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return logits `[batch, positions, vocabulary]` and their target tokens, -100 for none.

    For texts without `labels`, all tokens are targets.
    """
    if model.config.is_encoder_decoder:
        return model(**batch).logits, batch["labels"]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = batch.get("labels")
    if labels is None:
        labels = ids.masked_fill(mask == 0, IGNORED)
    logits = model(input_ids=ids, attention_mask=mask).logits
    return logits[:, :-1], labels[:, 1:]


def open_classifier_task(
    task: str, request: Request, tokenizer: Any, max_length: int | None, classes: Sequence[str]
) -> Task:
    """Open a task's texts: rows with `text`, optional `text_pair`, and `label` for evaluation.

    Args:
        task: The task.
        request: The request.
        tokenizer: Converts texts to token ids.
        max_length: Tokens of a text, by default 512.
        classes: Class names of the expert's head, by number.
    """
    columns, names = request.columns_of(task), _OF_CLASSIFIERS
    open_rows = partial(open_texts, columns=columns, names=names, usual=names)
    calibration_part, test_part = open_parts(task, request, open_rows)
    encode = partial(
        _encoded,
        tokenizer=tokenizer,
        limit=min(max_length or 512, tokenizer.model_max_length),
        batch_size=request.settings.batch_size,
    )
    batches, notes, tests = encode(calibration_part), [], None
    if test_part.indices:
        labels, notes = _labels(test_part, classes)
        tests = LabelTests(encode(test_part), labels)
    available = calibration_part.rows.column_names
    read = [columns.get(n, n) for n in names[: 2 + bool(test_part.indices)] if n in available]
    notes = [sentence(task, request, calibration_part, test_part, read), *notes]
    length = max(batch["input_ids"].shape[1] for batch in batches)
    return Task(batches, len(calibration_part.indices), length, tests, notes)


def _encoded(part: Part, *, tokenizer: Any, limit: int, batch_size: int) -> list[dict[str, Tensor]]:
    """Return token ids in padded batches."""
    rows = [part.rows[index] for index in part.indices]
    for index, row in zip(part.indices, rows, strict=True):
        texts = [row.get(_TEXT), row.get(_PAIR, "")]
        if not all(isinstance(text, str) for text in texts) or not texts[0].strip():
            types = {key: type(value).__name__ for key, value in sorted(row.items())}
            raise ValueError(
                f"{part.option}, item {index}: a row of a classifier has text (and text_pair, and "
                f"label); this one has {types}"
            )
    batches = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        encoded = tokenizer(
            [row[_TEXT] for row in batch],
            [row[_PAIR] for row in batch] if _PAIR in batch[0] else None,
            truncation=True,
            max_length=limit,
            padding=True,
            return_tensors="pt",
        )
        batches.append(dict(encoded))
    return batches


def _labels(part: Part, classes: Sequence[str]) -> tuple[Tensor, list[str]]:
    values: list[Any] = [part.rows[index].get(_LABEL) for index in part.indices]
    values = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
    if any(value is None for value in values):
        raise ValueError(f"{part.option}: rows need a label to be evaluated, or give --no-eval")
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return torch.tensor(check_labels(values, classes, part.option)), []
    names = sorted({str(value) for value in values})
    numbers, notes = label_numbers(names, classes, part.option)
    by_name = dict(zip(names, numbers, strict=True))
    return torch.tensor([by_name[str(value)] for value in values]), notes
