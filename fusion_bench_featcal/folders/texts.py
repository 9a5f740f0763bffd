"""Text tasks: for language models (prompts with targets, chats, texts) and for classifiers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.data.generation import row_losses, targets_of
from fusion_bench_featcal.data.loading import naming_setting
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.data.text_formats import FORMATS
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import IGNORED, TextEncoder
from fusion_bench_featcal.errors.nearest_names import nearest_hint, refuse_unknown
from fusion_bench_featcal.errors.plurals import counted
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
_OF_MODELS = ("prompt", "target", "messages", "text", "context", "choices", "system", "tools")
_OF_CLASSIFIERS = _TEXT, _PAIR, _LABEL = "text", "text_pair", "label"


def open_texts(
    location: str,
    split: str,
    option: str,
    *,
    columns: Mapping[str, str],
    names: Sequence[str],
    usual: Sequence[str],
) -> TextRows:
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
    refuse_unknown(columns, names, f"{option}: --columns ")
    with naming_setting(option):
        table = load_texts(location, split)
    available = table.column_names
    for column in columns.values():
        if column not in available:
            raise ValueError(
                f"{option} has no column {column!r}{nearest_hint(column, available)}; it has "
                f"{', '.join(available)}"
            )
    if columns and names == usual:
        columns = {n: n for n in usual if n in available} | dict(columns)
    elif not columns and not {*available} & {*usual}:
        raise ValueError(
            f"{option} has the columns {', '.join(available)}, of which none is usual: name them "
            f"by --columns {','.join(f'{name}=COLUMN' for name in names[:2])}"
        )
    with naming_setting(option):
        return TextRows(table, option, columns)


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
    open_rows = partial(
        open_texts, columns=request.columns_of(task), names=_OF_MODELS, usual=FORMATS
    )
    parts = open_parts(task, request, open_rows)
    calibration, test = (_language_batches(part, request, encoder, load_expert) for part in parts)
    length = max(calibration.lengths())
    tests = LanguageTests(test) if test.indices else None
    measure = "" if tests is None else tests.measure()
    notes = [sentence(task, request, *parts, calibration.columns("columns"), measure)]
    notes += _notes_of_rows(task, calibration)
    if calibration.are_generated:
        notes.append(f"{task}: no targets in --data, so its expert writes them")
    return Task(calibration, calibration.samples, length, tests, notes)


def _language_batches(part: Part, request: Request, encoder: TextEncoder, load: Any) -> TextBatches:
    """Return samples whose targets the expert writes if the rows have none."""
    batches = TextBatches(part.rows, part.indices, request.settings, encoder, load, request.device)
    lacking = [text.name for text in batches.texts if text.lacks_target]
    if 0 < len(lacking) < batches.samples:
        raise ValueError(
            f"{lacking[0]}: no target, as in {len(lacking)} of {batches.samples} rows. Leave "
            "these rows out, or leave out all targets, so that the expert writes them"
        )
    if lacking:
        generated = request.settings.replace(calibration_targets="generated")
        return replace(batches, settings=generated)
    return batches


def _notes_of_rows(task: str, batches: TextBatches, used: Sequence[str] = ()) -> list[str]:
    """Describe columns that are not read, and rows that do not count."""
    unread = [column for column in batches.columns("unread") if column not in used]
    notes = [f"{task}: columns that are not read: {', '.join(unread)}"] if unread else []
    if left_out := batches.rows.left_out:
        notes.append(f"{task}: {counted(left_out, 'row')} with weight 0 or label false left out")
    return notes


@dataclass
class LanguageTests:
    """Test texts, scored by the probability of their targets.

    A target counts as answered if each of its tokens is the model's first choice given the tokens
    before it, because greedy search would then generate it.
    """

    batches: TextBatches

    def measure(self) -> str:
        """Describe the unit of the accuracy."""
        self.batches.lengths()  # reads all texts
        whose = " that its expert writes" if self.batches.are_generated else ""
        return f"{'tokens' if self._counts_tokens else 'whole answers'}{whose} that are right"

    @cached_property
    def _counts_tokens(self) -> bool:
        """Return whether targets are too long for an exact answer, or are free text."""
        if self.batches.are_generated:
            return True
        labels = [sample.labels for sample in self.batches.encoded]
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
            is_target = labels != IGNORED
            losses.append(row_losses(logits, labels))
            right = (logits.argmax(dim=-1) == labels) | ~is_target
            tokens[0] += int((right & is_target).sum())
            tokens[1] += int(is_target.sum())
            exact.append(right.all(dim=1))
        correct = None if self._counts_tokens else torch.cat(exact).cpu()
        share = tokens[0] / max(tokens[1], 1) if correct is None else correct.double().mean().item()
        return Score(share, torch.cat(losses).double().cpu(), correct, choices, kind)


def open_classifier_task(
    task: str, request: Request, encoder: TextEncoder, classes: Sequence[str], *, pads: bool
) -> Task:
    """Open a task's texts: rows with `text`, optional `text_pair`, and `label` for evaluation.

    Args:
        task: The task.
        request: The request.
        encoder: Converts texts to token ids.
        classes: Class names of the expert's head, by number.
        pads: Whether the models know their padding token. Others are evaluated text by text.
    """
    names = _OF_CLASSIFIERS
    open_rows = partial(open_texts, columns=request.columns_of(task), names=names, usual=names)
    parts = calibration_part, test_part = open_parts(task, request, open_rows)

    def batches(part: Part, settings: Any) -> TextBatches:
        return TextBatches(part.rows, part.indices, settings, encoder, load_expert=nn.Identity)

    settings, labels = request.settings, [calibration_part.rows.columns.get(_LABEL, _LABEL)]
    calibration, notes, tests = batches(calibration_part, settings), [], None
    if test_part.indices:
        numbers, notes = head_labels(test_part, classes)
        one_by_one = settings if pads else settings.replace(batch_size=1)
        tests = LabelTests(batches(test_part, one_by_one), numbers)
    read = [*calibration.columns("columns"), *(labels if tests else [])]
    notes = [
        sentence(task, request, *parts, read),
        *_notes_of_rows(task, calibration, labels),
        *notes,
    ]
    return Task(calibration, calibration.samples, max(calibration.lengths()), tests, notes)


def head_labels(part: Part, classes: Sequence[str]) -> tuple[Tensor, list[str]]:
    """Return the head's number of each row's label, `[rows]`, and sentences on a guess.

    Labels with names are matched to the head's names. If the head has none, the numbers of a
    `ClassLabel` are the head's.
    """
    column = part.rows.columns.get(_LABEL, _LABEL)
    values: list[Any] = [part.rows[index].get(column) for index in part.indices]
    values = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
    if any(value is None for value in values):
        raise ValueError(f"{part.option}: rows need a label to be evaluated, or give --no-eval")
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return torch.tensor(check_labels(values, classes, part.option)), []
    names = sorted({str(value) for value in values})
    in_order = part.rows.classes(_LABEL)
    if in_order and all(name.startswith("LABEL_") for name in classes):
        names = in_order  # the head's numbers are the dataset's
    numbers, notes = label_numbers(names, classes, part.option)
    by_name = dict(zip(names, numbers, strict=True))
    return torch.tensor([by_name[str(value)] for value in values]), notes
