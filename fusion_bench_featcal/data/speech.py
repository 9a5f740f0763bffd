"""Samples of speech: sounds with their texts, one in a batch."""

import hashlib
import io
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.data.media_batches import MediaBatches
from fusion_bench_featcal.data.pictures import file_in
from fusion_bench_featcal.data.text_formats import Text, read_row
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import pad_rows
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.base import NO_TARGET

COLUMNS = ("audio", "text")
"""Columns of a row of speech."""


@dataclass(frozen=True)
class Speech:
    """A row with its sound.

    Attributes:
        text: What is said, as prompt and target.
        audio: Path of a sound's file, or its bytes.
    """

    text: Text
    audio: Any


def read_speech(rows: TextRows, index: int, home: Path) -> Speech:
    """Read a row of a dataset. The relative path of a sound starts at a folder.

    Raises:
        CalibrationError: If it has no sound or no text.
    """
    name, values = rows.at(index), dict(rows[index])
    audio, text = (rows.columns.get(column, column) for column in COLUMNS)
    for column in (audio, text):
        if not values.get(column):
            raise CalibrationError(
                f"{name}: no {column}. A row of speech needs audio and text: name their columns "
                "by --columns audio=COLUMN,text=COLUMN, or leave the row out"
            )
    sound = file_in(home, values.pop(audio))
    read = read_row(values, name, {"text": text})
    return Speech(replace(read, form="prompt", target=read.prompt), sound)


@dataclass(eq=False)
class SpeechBatches(MediaBatches):
    """One task's samples of speech, by a feature extractor of transformers.

    Attributes:
        start: Token with which decoders begin. Tokenizers may write it in front of targets.
    """

    start: int | None

    def content(self, row: Speech) -> Hashable:
        """Return tokens and digest of the sound, which tell repeated rows.

        Raises:
            CalibrationError: If sound or text cannot be used.
        """
        return *self._labels(row.text), hashlib.sha256(self._wave(row)).digest()

    def inputs_of(self, row: Speech) -> dict[str, Tensor]:
        """Return a row as a batch of the model's inputs, with its text as labels.

        Raises:
            CalibrationError: If sound or text cannot be used.
        """
        rate = self.processor.sampling_rate
        features = self.processor(self._wave(row), sampling_rate=rate, return_tensors="pt")
        return {**features, "labels": self.labels_of(row)}

    def joined(self, rows: Sequence[Speech]) -> dict[str, Tensor]:
        """Return several rows as one batch, with -100 behind labels."""
        batches = [self.inputs_of(row) for row in rows]
        labels = [batch.pop("labels")[0].tolist() for batch in batches]
        features = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        return {**features, "labels": pad_rows(labels, NO_TARGET, left=False)}

    def labels_of(self, row: Speech) -> Tensor:
        """Return a row's labels, `[1, tokens]`, without reading the sound."""
        return torch.tensor([self._labels(row.text)])

    def targets_of(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits and targets, without the first tokens, which are no words."""
        logits, targets = super().targets_of(model, batch)
        targets[:, : self._prefix] = NO_TARGET
        return logits, targets

    @cached_property
    def _prefix(self) -> int:
        """Number of tokens in front of all texts, such as the language."""
        marks = self._without_start(self.encoder.tokenizer(text_target="")["input_ids"])
        return sum(token not in self.encoder.ends for token in marks)

    def _labels(self, text: Text) -> list[int]:
        return self._without_start(self.encoder.sample(text).labels or [])

    def _without_start(self, ids: list[int]) -> list[int]:
        return ids[1:] if ids[:1] == [self.start] else ids

    def _wave(self, row: Speech) -> Any:
        rate, name = self.processor.sampling_rate, row.text.name
        wave = read_sound(row.audio, name, rate)
        longest = getattr(self.processor, "n_samples", len(wave))  # Whisper's cuts what is longer
        if len(wave) > longest:
            raise CalibrationError(
                f"{name}: the sound has {len(wave) / rate:.1f} s, more than the {longest / rate:g} "
                "s that the feature extractor reads. Cut sound and text, or leave the row out"
            )
        return wave


def read_sound(audio: Any, name: str, rate: int) -> Any:
    """Read a sound by `soundfile`, the mean of its channels.

    Args:
        audio: Path of a file in any of the library's formats, or its bytes.
        name: Name of the row in messages.
        rate: Sampling rate to which the sound is resampled.

    Returns:
        Float32 `[samples]`.

    Raises:
        CalibrationError: If the library is missing, or cannot read the sound.
    """
    from scipy.signal import resample_poly  # slow to import

    try:
        import soundfile  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:  # OSError without libsndfile
        raise CalibrationError(
            "sounds need soundfile: pip install 'fusion_bench_featcal[speech]'"
        ) from error
    try:
        content = audio if isinstance(audio, bytes) else Path(audio).read_bytes()
        wave, stored_rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except Exception as error:  # the library raises many types
        file = f"file {audio}" if isinstance(audio, Path) else "the audio"
        reason = getattr(error, "error_string", error)  # without the buffer's address
        raise CalibrationError(
            f"{name}: {file} cannot be read as a sound ({reason}). Repair or remove it"
        ) from error
    return resample_poly(wave.mean(axis=1), rate, stored_rate)
