"""Tasks of text classifiers: texts, pairs of texts, and labels for the scores."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from fusion_bench_featcal.data.labels import LABEL
from fusion_bench_featcal.data.scoring import class_tests
from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import (
    Subset,
    Task,
    TaskData,
    head_class_indices,
    not_scored,
)
from fusion_bench_featcal.folders.text_tables import notes_on_examples, open_texts
from fusion_bench_featcal.settings import FeatCalSettings

_COLUMNS = ("text", "text_pair", LABEL)


def open_class_task(
    task: str, request: Request, encoder: TextEncoder, classes: Sequence[str], *, pads: bool
) -> Task:
    """Open a task's texts: examples with `text`, optional `text_pair`, and `label` for the scores.

    Args:
        task: The task.
        request: The request.
        encoder: Converts texts to token ids.
        classes: Class names of the expert's head, by class index.
        pads: Whether the models know their padding token. Others are evaluated text by text.
    """
    columns = request.columns_of(task)
    open_dataset = partial(open_texts, columns=columns, names=_COLUMNS, usual=_COLUMNS)
    data = TaskData.open(task, request, open_dataset)
    column = data.samples.dataset.columns.get(LABEL, LABEL)
    if data.tests.indices:
        labels = _labels_of(data.tests)
        reason = not_scored(labels, classes)
        if task not in request.eval and all(label is None for label in labels):
            advice = f"give --columns {task}:label=COLUMN, or labelled examples with --eval"
            reason = f"its examples have no {column} ({advice})"
        data = data.unscored(reason) if reason else data

    def batches(subset: Subset, settings: FeatCalSettings) -> TextBatches:
        texts = subset.dataset, subset.indices
        return TextBatches(*texts, settings, encoder, nn.Identity, request.device)

    settings, scorer, note = request.settings, None, None
    calibration = batches(data.samples, settings)
    test = batches(data.tests, settings if pads else settings.replace(batch_size=1))
    data, places = data.without_repeats(map(repr, calibration.inputs), map(repr, test.inputs))
    test = test.select(places)
    if test.indices:
        class_indices, note = _class_indices(data, classes)
        scorer = class_tests(test.checked, test.batch_size, class_indices)
    unread = [name for name in calibration.unread if name != column]
    notes = [*notes_on_examples(data, unread, calibration, test), *filter(None, [note])]
    read_columns = [*calibration.columns, *([column] if scorer else [])]
    return data.opened(calibration, scorer, read_columns, notes)


def _class_indices(data: TaskData, classes: Sequence[str]) -> tuple[list[int], str | None]:
    """Return the head's class index of each test example, and a note, as `head_class_indices`."""
    test, labels = data.tests, _labels_of(data.tests)
    if None in labels:
        column = test.dataset.columns.get(LABEL, LABEL)
        raise ValueError(
            f"{test.option}: the evaluation needs labels, but column {column!r} is empty or "
            "missing. Name the column with --columns label=COLUMN, or give --no-eval"
        )
    more_labels = _labels_of(data.samples) if test.dataset is data.samples.dataset else []
    names = test.dataset.classes(LABEL)
    return head_class_indices(
        labels, names, classes, lambda n: test.dataset.row_name(test.indices[n]), more_labels
    )


def _labels_of(subset: Subset) -> list[Any]:
    """Return the label of each example, or None if it has none."""
    column = subset.dataset.columns.get(LABEL, LABEL)
    return [subset.dataset[index].get(column) for index in subset.indices]
