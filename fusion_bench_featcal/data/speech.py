"""Samples of speech: sounds with their texts, one in a batch."""

import hashlib
import io
import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.data.chats import has_value, unused_column
from fusion_bench_featcal.data.media_batches import MediaBatches
from fusion_bench_featcal.data.pictures import file_in
from fusion_bench_featcal.data.templates import special_ids
from fusion_bench_featcal.data.text_formats import NEEDED, PROMPTS, Text, read_row
from fusion_bench_featcal.data.text_limits import longest_text
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import pad_rows
from fusion_bench_featcal.data.word_errors import speech_library
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.families.base import NO_TARGET

COLUMNS = ("audio", "text")
"""Columns of an example of speech."""
# Columns that change what is heard or written, so that an example with one is refused.
_NEEDED = (*NEEDED, *PROMPTS, "start", "end", "offset", "duration", "language", "task")


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
        CalibrationError: If it has no sound or no text, or a column that would change the sound or
            the text. If both columns have been named, no others are read.
    """
    name, values = rows.row_name(index), dict(rows[index])
    audio, text = (rows.columns.get(column, column) for column in COLUMNS)
    for column in (column for column in (audio, text) if not values.get(column)):
        raise CalibrationError(
            f"{name}: no {column}. A row of speech needs audio and text: name their columns "
            "by --columns audio=COLUMN,text=COLUMN, or leave the row out"
        )
    sound = file_in(home, values.pop(audio))
    needed = () if len(rows.columns) == len(COLUMNS) else _NEEDED
    for column in (column for column in needed if has_value(values.get(column))):
        advice = "Name both columns by --columns audio=COLUMN,text=COLUMN to read no others"
        raise unused_column(name, column, "speech", advice)
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
        return *self.labels_of(row)[0].tolist(), hashlib.sha256(self._wave(row)).digest()

    def inputs_of(self, row: Speech) -> dict[str, Tensor]:
        """Return a row as a batch of the model's inputs, with its text as labels.

        Raises:
            CalibrationError: If sound or text cannot be used.
        """
        return self.joined([row])

    def joined(self, rows: Sequence[Speech]) -> dict[str, Tensor]:
        """Return several rows as one batch, with -100 behind labels."""
        rate, sounds = self.processor.sampling_rate, [*map(self._wave, rows)]
        features = self.processor(sounds, sampling_rate=rate, return_tensors="pt")
        labels = [self.labels_of(row)[0].tolist() for row in rows]
        return {**features, "labels": pad_rows(labels, NO_TARGET, left=False)}

    def labels_of(self, row: Speech) -> Tensor:
        """Return a row's labels, `[1, tokens]`, without reading the sound.

        Raises:
            CalibrationError: If the text is empty, contains special tokens, or does not fit.
        """
        encoder, tokenizer, text = self.encoder, self.encoder.tokenizer, str(row.text.target)
        labels, alone = self._tokens(text), Counter(self._tokens(""))
        content = {tokenizer.unk_token_id} - encoder.ends  # Whisper's unknown token is its end
        special = {*special_ids(tokenizer), *alone, self.start} - content
        extra = Counter(filter(special.__contains__, labels)) - alone
        found = " ".join(tokenizer.convert_ids_to_tokens([*extra]))
        most = encoder.max_length or longest_text(tokenizer, encoder.positions)[0]
        _refuse(row.text.name, "Change it, or leave the row out", {
            "the text is empty": not text.strip(),
            f"the text contains special tokens ({found}), which the tokenizer writes itself": extra,
            f"the text has {len(labels)} tokens, more than {most}, the positions of the model or "
            f"tokenizer, or {option('max_length')}": len(labels) > most,
        })  # fmt: skip
        return torch.tensor([labels])

    def targets_of(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits and targets, without the first tokens, which are no words."""
        logits, targets = super().targets_of(model, batch)
        targets[:, : len(self.prefix)] = NO_TARGET
        return logits, targets

    @cached_property
    def prefix(self) -> list[int]:
        """Tokens in front of all texts, such as the language, behind the start."""
        return [token for token in self._tokens("") if token not in self.encoder.ends]

    def _tokens(self, text: str) -> list[int]:
        """Return a text's tokens without the start."""
        ids = list(self.encoder.tokenizer(text_target=text, verbose=False)["input_ids"])
        return ids[1:] if ids[:1] == [self.start] else ids

    def _wave(self, row: Speech) -> Any:
        rate, name = self.processor.sampling_rate, row.text.name
        wave = read_sound(row.audio, name, rate)
        longest = getattr(self.processor, "n_samples", len(wave))  # Whisper's cuts what is longer
        _refuse(name, "Cut sound and text, or leave the row out", {
            f"the sound has {len(wave) / rate:.1f} s, more than the {longest / rate:g} s that the "
            "feature extractor reads": len(wave) > longest
        })  # fmt: skip
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
        CalibrationError: If the library is missing or cannot read the sound, which has no frames,
            fewer than its header promises, or an unusual sampling rate.
    """
    from scipy.signal import resample_poly  # slow to import

    soundfile = speech_library("soundfile")
    file = f"file {audio}" if isinstance(audio, Path) else "the audio"
    try:
        content = audio if isinstance(audio, bytes) else Path(audio).read_bytes()
        with soundfile.SoundFile(io.BytesIO(content)) as stream:
            wave = stream.read(dtype="float32", always_2d=True)
            stored_rate, frames, header = stream.samplerate, stream.frames, stream.extra_info
    except Exception as error:  # the library raises many types
        reason = getattr(error, "error_string", error)  # without the buffer's address
        raise CalibrationError(
            f"{name}: {file} cannot be read as a sound ({reason}). Repair or remove it"
        ) from error
    # Headers of compressed sounds are estimates. Those of streams have sizes of gigabytes.
    sizes = re.findall(r"(\d+) \(should be (\d+)\)", header)
    parts = [int(real) / int(size) for size, real in sizes if 0 < int(size) < 2**30]
    part = min([len(wave) / max(frames, 1), *parts])
    # The filter of a change of rates has 20 coefficients a step.
    steps = stored_rate // math.gcd(stored_rate, rate)
    is_usual = 1_000 <= stored_rate <= 192_000 and steps <= 50_000
    _refuse(f"{name}: {file}", "Repair or remove it", {
        "it has no sound": not len(wave),
        f"it has {part:.0%} of the sound that its header promises": part < 0.99,
        f"it has an unusual sampling rate, {stored_rate} Hz": not is_usual,
    })  # fmt: skip
    return resample_poly(wave.mean(axis=1), rate, stored_rate)


def _refuse(name: str, advice: str, problems: Mapping[str, object]) -> None:
    """Refuse an example with the first of these problems that it has."""
    for problem in (problem for problem, is_there in problems.items() if is_there):
        raise CalibrationError(f"{name}: {problem}. {advice}")
