"""Tasks of language models: prompts with targets, chats, and texts, with or without images."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from statistics import median
from typing import Any, TypeVar

from fusion_bench_featcal.data.draws import evenly_spaced
from fusion_bench_featcal.data.generation import logits_and_targets
from fusion_bench_featcal.data.image_texts import ImageTextBatches
from fusion_bench_featcal.data.media_batches import MediaBatches
from fusion_bench_featcal.data.pictures import resolve_file
from fusion_bench_featcal.data.scoring import Tests
from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.data.text_formats import FORMATS, STANDARD, Text
from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.families import text_tower
from fusion_bench_featcal.families.base import NO_TARGET
from fusion_bench_featcal.folders.tasks import OTHER_TEXT, Task, TaskData
from fusion_bench_featcal.folders.text_tables import notes_on_examples, open_texts
from fusion_bench_featcal.folders.transformers_models import TransformersModels
from fusion_bench_featcal.settings import FeatCalSettings

Batches = TypeVar("Batches", bound=MediaBatches)

LONG = 16
"""Median number of target tokens above which accuracy counts tokens, not whole answers."""
_PROMPT_COLUMNS = ("prompt", "target", "messages", "text", "context", "choices", "system")
_WHOLE_ANSWERS = "exact match of whole answers"
_TOKENS = "share of correctly predicted tokens"


def open_language_task(task: str, models: TransformersModels, encoder: TextEncoder) -> Task:
    """Open a task's texts, and read the selected examples.

    Args:
        task: The task.
        models: The models. The expert generates the targets if the examples have none.
        encoder: Converts texts to token ids.
    """
    request, reads_images = models.inputs.request, text_tower(models.paired.body) is not None
    columns, settings = request.columns_of(task), request.settings
    open_dataset = partial(
        open_texts, columns=columns, names=_PROMPT_COLUMNS, usual=FORMATS, reads_images=reads_images
    )
    data = TaskData.open(task, request, open_dataset)
    options = settings, encoder, partial(models.load_expert, task), request.device
    batches = [TextBatches(s.dataset, s.indices, *options) for s in (data.samples, data.tests)]
    texts = [one.texts for one in batches]
    if reads_images and any(text.images for task_texts in texts for text in task_texts):
        processor = models.processor.image_processor()
        return _open_image_texts(data, texts, encoder, processor)
    calibration, test = map(_with_targets, batches)
    data, places = data.without_repeats(map(repr, calibration.inputs), map(repr, test.inputs))
    test = test.select(places)
    if test.are_generated and task not in request.expert:
        raise ValueError(f"{data.tests.option} has no targets, and no expert can generate them")
    lengths = [LONG + 1] * test.samples  # answers that the expert writes count as long
    if not test.are_generated:
        rows = [sample.labels for sample in test.encoded]
        lengths = [sum(token != NO_TARGET for token in row) if row else LONG + 1 for row in rows]
    scorer, measure = _score_answers(test, lengths)
    notes = notes_on_examples(data, calibration.unread, calibration, test)
    are_plain = all(text.form == "prompt" for text in calibration.texts)
    if are_plain and getattr(encoder.tokenizer, "chat_template", None):
        notes.append(
            "the tokenizer's chat template is not applied to these prompts, only to messages. If "
            "you use the model in chats, give examples with messages"
        )
    if calibration.are_generated:
        notes.append(_note_on_generated_targets(data, calibration))
    return data.opened(calibration, scorer, calibration.columns, notes, measure=measure)


def open_other_text(models: TransformersModels, encoder: TextEncoder) -> Task:
    """Open general sentences, on which language models are compared by their loss."""
    request = models.inputs.request
    file = str(files(__package__ or "").joinpath("other_text.jsonl"))
    rows = open_texts(file, "train", OTHER_TEXT, columns={}, names=_PROMPT_COLUMNS, usual=FORMATS)
    chosen, settings = evenly_spaced(len(rows), request.eval_rows), FeatCalSettings()
    load_expert = partial(models.load_expert, OTHER_TEXT)  # not called, as texts need no targets
    test = TextBatches(rows, chosen, settings, encoder, load_expert, request.device)
    scorer, _ = _score_answers(test, [LONG + 1] * test.samples)
    return Task([], 0, scorer, available=len(rows))


def _note_on_generated_targets(data: TaskData, calibration: TextBatches) -> str:
    """Return a sentence on examples without targets, and how a column of targets is named."""
    task, unread = data.task, calibration.unread
    stored = {column: name for name, column in data.request.columns_of(task).items()}
    names = {STANDARD.get(stored.get(c, c), stored.get(c, c)): c for c in calibration.columns}
    pairs = ",".join(f"{name}={column}" for name, column in names.items())
    way = f"--columns {task}:{pairs},target=COLUMN"
    if not {*names} <= {*_PROMPT_COLUMNS} or len(names) < len(calibration.columns):
        way = "name that column target"
    advice = f". If {' or '.join(unread)} contains them: {way}" if unread else ""
    return f"no targets in --data, so its expert generates them{advice}"


def _with_targets(batches: TextBatches) -> TextBatches:
    """Return samples whose targets the expert writes if the rows have none."""
    lacking = [text.name for text in batches.texts if text.lacks_target]
    if 0 < len(lacking) < batches.samples:
        raise ValueError(
            f"{lacking[0]}: {len(lacking)} of {batches.samples} examples have no target. Remove "
            "these examples, or remove all targets, so that the expert generates them"
        )
    if not lacking:
        return batches
    return replace(batches, settings=batches.settings.replace(calibration_targets="generated"))


def _score_answers(
    test: TextBatches | ImageTextBatches, lengths: Sequence[int]
) -> tuple[Tests | None, str]:
    """Return a scorer of test examples and what it measures, or None if there are no examples.

    Args:
        test: The test examples.
        lengths: Number of tokens of each target. If they are long, accuracy counts tokens.
    """
    if not lengths:
        return None, ""
    by_token = median(lengths) > LONG
    scorer = Tests(test.checked, logits_and_targets, by_token, ends=[*test.encoder.ends])
    return scorer, _TOKENS if by_token else _WHOLE_ANSWERS


def _open_image_texts(
    data: TaskData, texts: Sequence[Sequence[Text]], encoder: TextEncoder, processor: Any
) -> Task:
    """Open a task of texts with images. Answers are scored in the same way as without images.

    Args:
        data: The task's data.
        texts: Texts of the samples, and of the test examples.
        encoder: Converts texts to token ids.
        processor: Converts texts with images to inputs.
    """
    request = data.request
    if request.settings.calibration_targets == "generated":
        raise ValueError(
            f"{data.samples.option} has images, for which experts generate no answers: leave out "
            f"{option('calibration_targets', 'generated')}, and add answers to the examples"
        )
    samples, tested = (
        [replace(text, images=tuple(resolve_file(folder, i) for i in text.images)) for text in some]
        for folder, some in zip((data.samples.folder, data.tests.folder), texts, strict=True)
    )
    chosen = request.settings.max_length if "max_length" in request.set else None
    calibration = ImageTextBatches(samples, processor, encoder, chosen or encoder.positions)
    columns = dict.fromkeys(name for text in samples for name in text.columns)
    notes = notes_on_examples(data, calibration.unread)
    notes += [
        "towers, and the modules between them and the decoder, are calibrated with the examples "
        "that have images"
    ]
    if any(text.form == "prompt" for text in samples):
        notes.append("the chat template renders every prompt as a user turn")
    data, test = without_repeated_media(data, calibration, tested)
    lengths = [int((test.encode_target(row) != NO_TARGET).sum()) for row in test.rows]
    scorer, measure = _score_answers(test, lengths)
    return data.opened(calibration, scorer, columns, notes, measure=measure)


def without_repeated_media(
    data: TaskData, calibration: Batches, tested: Sequence[Any]
) -> tuple[TaskData, Batches]:
    """Leave out test examples with images or sounds that repeat a sample.

    Args:
        data: The task's data.
        calibration: The samples.
        tested: The test examples, of the same type as `calibration.rows`.

    Returns:
        The task's data, and batches of the test examples that remain.
    """
    keys = ([*map(calibration.dedup_key, subset)] for subset in (calibration.rows, tested))
    data, places = data.without_repeats(*keys)
    return data, replace(calibration, rows=[tested[place] for place in places])
