"""Tasks of speech models: audio and its transcripts."""

from functools import partial
from typing import Any

from fusion_bench_featcal.data.speech import COLUMNS, SpeechBatches, read_speech
from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.data.transcripts import TranscriptScorer
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import Task, TaskData
from fusion_bench_featcal.folders.text_tables import open_texts
from fusion_bench_featcal.folders.texts import without_repeated_media


def open_speech_task(
    task: str, request: Request, encoder: TextEncoder, extractor: Any, start: int | None
) -> Task:
    """Open a task's speech: examples with `audio` and `text`, scored by their words.

    Args:
        task: The task.
        request: The request.
        encoder: Converts texts to token ids.
        extractor: Converts sounds to features.
        start: Token with which decoders begin.
    """
    columns = request.columns_of(task)
    open_dataset = partial(open_texts, columns=columns, names=COLUMNS, usual=COLUMNS[:1])
    data = TaskData.open(task, request, open_dataset)
    samples, tested = (
        [read_speech(subset.dataset, index, subset.folder) for index in subset.indices]
        for subset in (data.samples, data.tests)
    )
    calibration = SpeechBatches(samples, extractor, encoder, start)
    unread = dict.fromkeys(name for text in calibration.texts for name in text.unread)
    notes = [f"columns that are not read: {', '.join(unread)}"] if unread else []
    read = [columns.get(name, name) for name in COLUMNS]
    data, test = without_repeated_media(data, calibration, tested)
    return data.opened(
        calibration,
        TranscriptScorer(test) if test.rows else None,
        read,
        notes,
        measure="word accuracy, 1 - word error rate",
    )
