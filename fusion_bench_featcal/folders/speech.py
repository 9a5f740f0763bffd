"""Tasks of speech models: sounds and their texts."""

from functools import partial
from typing import Any

from fusion_bench_featcal.data.speech import COLUMNS, SpeechBatches, read_speech
from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.data.transcripts import TranscriptScorer
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import Task, TaskRows
from fusion_bench_featcal.folders.texts import folder_of, open_media, open_texts


def open_speech_task(
    task: str, request: Request, encoder: TextEncoder, extractor: Any, start: int | None
) -> Task:
    """Open a task's speech: rows with `audio` and `text`. Transcripts are scored by their words.

    Args:
        task: The task.
        request: The request.
        encoder: Converts texts to token ids.
        extractor: Converts sounds to features.
        start: Token with which decoders begin.
    """
    columns = request.columns_of(task)
    open_rows = partial(open_texts, columns=columns, names=COLUMNS, usual=COLUMNS[:1])
    rows = TaskRows.open(task, request, open_rows)
    samples, tested = (
        [read_speech(part.rows, index, folder_of(part)) for index in part.indices]
        for part in (rows.samples, rows.tests)
    )
    calibration = SpeechBatches(samples, extractor, encoder, start)
    unread = dict.fromkeys(name for text in calibration.texts for name in text.unread)
    notes = [f"columns that are not read: {', '.join(unread)}"] if unread else []
    read = [columns.get(name, name) for name in COLUMNS]
    return open_media(rows, calibration, tested, read, notes, _transcripts)


def _transcripts(test: SpeechBatches) -> tuple[TranscriptScorer, dict[str, str]]:
    measure, title = "word accuracy, 1 - word error rate", "word accuracy % (loss)"
    return TranscriptScorer(test), {"measure": measure, "title": title}
