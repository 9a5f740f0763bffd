"""Text tasks: for language models (prompts with targets, chats, texts) and classifiers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from fusion_bench_featcal.data.generation import logits_and_targets
from fusion_bench_featcal.data.image_texts import ImageTextBatches
from fusion_bench_featcal.data.labels import LABEL
from fusion_bench_featcal.data.loading import unloadable
from fusion_bench_featcal.data.media_batches import MediaBatches
from fusion_bench_featcal.data.pictures import resolve_file
from fusion_bench_featcal.data.scoring import Tests, class_tests
from fusion_bench_featcal.data.tables import load_texts, parent_folder
from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.data.text_formats import FORMATS, IMAGES, STANDARD, Text
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.families.base import NO_TARGET
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import (
    Part,
    Scorer,
    Task,
    TaskRows,
    head_numbers,
    not_scored,
)
from fusion_bench_featcal.settings import FeatCalSettings

LONG = 16
"""Median number of target tokens above which accuracy counts tokens, not whole answers."""
_PROMPT_COLUMNS = ("prompt", "target", "messages", "text", "context", "choices", "system")
_TEXT, _PAIR = "text", "text_pair"
_CLASSIFIER_COLUMNS = _TEXT, _PAIR, LABEL


def open_texts(
    location: str,
    split: str,
    option: str,
    *,
    columns: Mapping[str, str],
    names: Sequence[str],
    usual: Sequence[str],
    reads_images: bool = False,
) -> TextRows:
    """Open a table of texts, optionally with renamed columns.

    Args:
        location: A table, a saved dataset or a hub dataset, as for `load_texts`.
        split: The split, if there are several.
        option: The option that names it, for messages.
        columns: Standard name of a column -> its name in the table. If there are any, only these
            columns are read. Standard columns are also read if `names` equals `usual`. The label
            may be missing, because only scores need it.
        names: Standard names that are allowed.
        usual: Standard columns, one of which is needed if `columns` is empty.
        reads_images: Whether the models read images, whose columns are then allowed and read.
    """
    images = IMAGES if reads_images else ()
    refuse_unknown(columns, (*names, *images), f"{option}: --columns ")
    with error_context(option, cause=unloadable):
        table = load_texts(location, split)
    available = {*table.column_names}
    if not len(table):
        raise ValueError(f"{option} has no rows")
    chosen = {name: column for name, column in columns.items() if name != LABEL}
    absent = [f"{name}={column}" for name, column in chosen.items() if column not in available]
    if absent or not (chosen or available & {*usual} - {LABEL}):
        needed = names[:2] if names != usual else (_TEXT, LABEL)
        reason = f", so {', '.join(absent)} is wrong" if absent else ""
        raise ValueError(
            f"{option} has the columns {', '.join(table.column_names)}{reason}: name them by "
            f"--columns [NAME:]{','.join(f'{name}=COLUMN' for name in needed)}"
        )
    if columns:
        others = usual if names == usual else images
        columns = {n: n for n in others if n in available} | dict(columns)
    with error_context(option, cause=unloadable):
        return TextRows(table, option, columns, reads_images=reads_images)


def open_language_task(
    task: str,
    request: Request,
    encoder: TextEncoder,
    load_expert: Callable[[], nn.Module],
    image_processor: Callable[[], Any] | None = None,
) -> Task:
    """Open a task's texts, and read the selected rows.

    Args:
        task: The task.
        request: The request.
        encoder: Converts texts to token ids.
        load_expert: Loads the task's expert, if it generates the targets.
        image_processor: Returns the processor of texts with images, if the models read images.
    """
    columns, reads_images = request.columns_of(task), image_processor is not None
    open_rows = partial(
        open_texts, columns=columns, names=_PROMPT_COLUMNS, usual=FORMATS, reads_images=reads_images
    )
    rows = TaskRows.open(task, request, open_rows)
    parts = [
        TextBatches(part.rows, part.indices, request.settings, encoder, load_expert, request.device)
        for part in (rows.samples, rows.tests)
    ]
    if image_processor is not None and any(text.images for part in parts for text in part.texts):
        return _open_image_texts(rows, [part.texts for part in parts], encoder, image_processor())
    calibration, test = map(_with_targets, parts)
    rows, places = rows.without_repeats(map(repr, calibration.inputs), map(repr, test.inputs))
    test = test.select(places)
    tests, described = None, dict[str, str]()
    if test.indices:
        tests, described = _answers(test, logits_and_targets, _counts_tokens(test))
    notes = _notes_of_rows(rows, calibration.unread, calibration, test)
    are_plain = all(text.form == "prompt" for text in calibration.texts)
    if are_plain and getattr(encoder.tokenizer, "chat_template", None):
        notes.append(
            "prompts are texts, to which the tokenizer's chat template is not applied. If the "
            "model is used in chats, give rows with messages"
        )
    if calibration.are_generated:
        unread = calibration.unread
        stored = {column: name for name, column in columns.items()}
        names = {STANDARD.get(stored.get(c, c), stored.get(c, c)): c for c in calibration.columns}
        pairs = ",".join(f"{name}={column}" for name, column in names.items())
        way = f"--columns {task}:{pairs},target=COLUMN"
        if not {*names} <= {*_PROMPT_COLUMNS} or len(names) < len(calibration.columns):
            way = "name that column target"
        advice = f". If {' or '.join(unread)} has them: {way}" if unread else ""
        notes.append(f"no targets in --data, so its expert writes them{advice}")
    return rows.opened(calibration, tests, calibration.columns, notes, **described)


def folder_of(part: Part) -> Path:
    """Return the folder of a part's table, where relative paths start."""
    return parent_folder(part.option.partition("=")[2])


def _open_image_texts(
    rows: TaskRows, texts: Sequence[Sequence[Text]], encoder: TextEncoder, processor: Any
) -> Task:
    """Open a task of texts with images. Answers are scored as those to texts alone."""
    request = rows.request
    if request.settings.calibration_targets == "generated":
        raise ValueError(
            f"{rows.samples.option} has images, for which experts generate no answers: leave out "
            f"{option('calibration_targets', 'generated')}, and give the rows answers"
        )
    samples, tested = (
        [replace(text, images=tuple(resolve_file(home, i) for i in text.images)) for text in part]
        for home, part in zip(map(folder_of, (rows.samples, rows.tests)), texts, strict=True)
    )
    chosen = request.settings.max_length if "max_length" in request.set else None
    limit = chosen or encoder.positions
    calibration = ImageTextBatches(samples, processor, encoder, limit)
    columns = dict.fromkeys(name for text in samples for name in text.columns)
    notes = _notes_of_rows(rows, calibration.unread)
    notes += ["towers, and modules between them and the decoder, are calibrated where images run"]
    if any(text.form == "prompt" for text in samples):
        notes.append("the chat template writes all prompts as turns of a user")
    return open_media(rows, calibration, tested, [*columns], notes)


def _answers(
    test: TextBatches | MediaBatches, targets: Callable[..., Any], by_token: bool
) -> tuple[Tests, dict[str, str]]:
    """Return what scores answers, and its measure in words."""
    tests = Tests(test.checked, targets, by_token, ends=[*test.encoder.ends])
    right = "tokens" if by_token else "whole answers"
    return tests, {"measure": f"share of {right} that are right"}


def _answer_tests(test: MediaBatches) -> tuple[Tests, dict[str, str]]:
    lengths = [int((test.encode_target(row) != NO_TARGET).sum()) for row in test.rows]
    return _answers(test, test.logits_and_targets, median(lengths) > LONG)


def open_media(
    rows: TaskRows,
    calibration: MediaBatches,
    tested: Sequence[Any],
    columns: Sequence[str],
    notes: Sequence[str],
    tests_of: Callable[[Any], tuple[Scorer, dict[str, str]]] = _answer_tests,
) -> Task:
    """Open a task of images or sounds with texts.

    Args:
        rows: The task's rows.
        calibration: Its samples.
        tested: Its test rows, as those of the samples.
        columns: The columns that are read.
        notes: Sentences on the samples.
        tests_of: Returns what scores test rows, and its `measure` and `title` for `opened`. By
            default answers are right or wrong.
    """
    parts = (calibration.rows, tested)
    rows, places = rows.without_repeats(*([*map(calibration.dedup_key, part)] for part in parts))
    test = replace(calibration, rows=[tested[place] for place in places])
    tests, described = tests_of(test) if test.rows else (None, {})
    return rows.opened(calibration, tests, columns, notes, **described)


def _with_targets(batches: TextBatches) -> TextBatches:
    """Return samples whose targets the expert writes if the rows have none."""
    lacking = [text.name for text in batches.texts if text.lacks_target]
    if 0 < len(lacking) < batches.samples:
        raise ValueError(
            f"{lacking[0]}: no target, as in {len(lacking)} of {batches.samples} rows. Leave "
            "these rows out, or leave out all targets, so that the expert writes them"
        )
    if not lacking:
        return batches
    return replace(batches, settings=batches.settings.replace(calibration_targets="generated"))


def _counts_tokens(batches: TextBatches) -> bool:
    """Return whether targets are too long for an exact answer, or are free text."""
    if batches.are_generated:
        return True
    labels = [sample.labels for sample in batches.encoded]
    lengths = [sum(token != NO_TARGET for token in row) if row else LONG + 1 for row in labels]
    return median(lengths) > LONG


def _notes_of_rows(rows: TaskRows, unread: Sequence[str], *batches: TextBatches) -> list[str]:
    """Describe columns that are not read, rows that do not count, and texts that are cut."""
    notes = [f"columns that are not read: {', '.join(unread)}"] if unread else []
    if left_out := rows.samples.rows.left_out:
        notes.append(f"{pluralize(left_out, 'row')} with weight 0 or label false left out")
    for part, texts in zip(("samples", "rows to evaluate on"), batches, strict=False):
        if cut := texts.truncation_note(texts.inputs):
            notes.append(f"of the {part}, {cut}")
    return notes


def open_class_task(
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
    names, columns = _CLASSIFIER_COLUMNS, request.columns_of(task)
    open_rows = partial(open_texts, columns=columns, names=names, usual=names)
    rows = TaskRows.open(task, request, open_rows)
    column = rows.samples.rows.columns.get(LABEL, LABEL)
    if rows.tests.indices:
        values = _labels_of(rows.tests)
        reason = not_scored(values, classes)
        if task not in request.eval and all(value is None for value in values):
            advice = f"--columns {task}:label=COLUMN, or labelled rows by --eval"
            reason = f"its rows have no {column} ({advice})"
        rows = rows.unscored(reason) if reason else rows

    def batches(part: Part, settings: FeatCalSettings) -> TextBatches:
        texts = part.rows, part.indices
        return TextBatches(*texts, settings, encoder, nn.Identity, request.device)

    settings, tests, remark = request.settings, None, ""
    calibration = batches(rows.samples, settings)
    test = batches(rows.tests, settings if pads else settings.replace(batch_size=1))
    rows, places = rows.without_repeats(map(repr, calibration.inputs), map(repr, test.inputs))
    test = test.select(places)
    if test.indices:
        shares_rows = rows.tests.rows is rows.samples.rows
        more_labels = _labels_of(rows.samples) if shares_rows else []
        numbers, remark = head_labels(rows.tests, classes, more_labels)
        tests = class_tests(test.checked, test.batch_size, numbers)
    unread = [name for name in calibration.unread if name != column]
    notes = [*_notes_of_rows(rows, unread, calibration, test), *filter(None, [remark])]
    read = [*calibration.columns, *([column] if tests else [])]
    return rows.opened(calibration, tests, read, notes)


def _labels_of(part: Part) -> list[Any]:
    """Return the label of each row, None where it has none."""
    column = part.rows.columns.get(LABEL, LABEL)
    return [part.rows[index].get(column) for index in part.indices]


def head_labels(
    part: Part, classes: Sequence[str], more_labels: Sequence[object] = ()
) -> tuple[list[int], str]:
    """Return the head's number of each row's label, and a note, as `head_numbers`."""
    rows, values = part.rows, _labels_of(part)
    if None in values:
        column = rows.columns.get(LABEL, LABEL)
        raise ValueError(
            f"{part.option}: rows need a label to be evaluated ({column!r} is empty or no column): "
            "name its column by --columns label=COLUMN, or give --no-eval"
        )
    names = rows.classes(LABEL)
    return head_numbers(
        values, names, classes, lambda n: rows.row_name(part.indices[n]), more_labels
    )
