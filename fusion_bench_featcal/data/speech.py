"""Speech samples: sounds with their texts, one per batch."""

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

from fusion_bench_featcal.data.chats import column_error, has_value
from fusion_bench_featcal.data.media_batches import MediaBatches
from fusion_bench_featcal.data.pictures import resolve_file
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
    """An example of speech.

    Attributes:
        text: The transcript, as prompt and target.
        audio: Path of a sound's file, or its bytes.
    """

    text: Text
    audio: Any


def read_speech(rows: TextRows, index: int, home: Path) -> Speech:
    """Read an example of a dataset. Relative paths of sounds start at the folder `home`.

    Raises:
        CalibrationError: If the example has no sound, no text, or another column that would change
            them. If `--columns` names both columns, no other column is read.
    """
    name, values = rows.row_name(index), dict(rows[index])
    audio, text = (rows.columns.get(column, column) for column in COLUMNS)
    for column in (column for column in (audio, text) if not values.get(column)):
        raise CalibrationError(
            f"{name}: no {column}. A speech example needs audio and text: name their columns "
            "with --columns audio=COLUMN,text=COLUMN, or remove the example"
        )
    sound = resolve_file(home, values.pop(audio))
    needed = () if len(rows.columns) == len(COLUMNS) else _NEEDED
    for column in (column for column in needed if has_value(values.get(column))):
        advice = "Name both columns with --columns audio=COLUMN,text=COLUMN to read no others"
        raise column_error(name, column, "speech", advice)
    read = read_row(values, name, {"text": text})
    return Speech(replace(read, form="prompt", target=read.prompt), sound)


@dataclass(eq=False)
class SpeechBatches(MediaBatches):
    """One task's speech samples, with a transformers feature extractor as processor.

    Attributes:
        start: The decoder's start token. Some tokenizers write it before targets.
    """

    start: int | None

    def dedup_key(self, row: Speech) -> Hashable:
        """Return the target's tokens and a digest of the sound.

        Raises:
            CalibrationError: If sound or text cannot be used.
        """
        return *self.encode_target(row)[0].tolist(), hashlib.sha256(self._read_wave(row)).digest()

    def encode(self, row: Speech) -> dict[str, Tensor]:
        """Return an example as a batch of the model's inputs, with its text as labels.

        Raises:
            CalibrationError: If sound or text cannot be used.
        """
        return self.collate([row])

    def collate(self, rows: Sequence[Speech]) -> dict[str, Tensor]:
        """Return several examples as one batch. Labels are padded with -100 on the right."""
        rate, sounds = self.processor.sampling_rate, [*map(self._read_wave, rows)]
        features = self.processor(sounds, sampling_rate=rate, return_tensors="pt")
        labels = [self.encode_target(row)[0].tolist() for row in rows]
        return {**features, "labels": pad_rows(labels, NO_TARGET, left=False)}

    def encode_target(self, row: Speech) -> Tensor:
        """Return the labels of an example, `[1, tokens]`, without reading the sound.

        Raises:
            CalibrationError: If the text is empty, contains special tokens, or does not fit.
        """
        encoder, tokenizer, text = self.encoder, self.encoder.tokenizer, str(row.text.target)
        labels, affixes = self._target_ids(text), Counter(self._target_ids(""))
        content = {tokenizer.unk_token_id} - encoder.ends  # Whisper's unknown token is its end
        special = {*special_ids(tokenizer), *affixes, self.start} - content
        extra = Counter(filter(special.__contains__, labels)) - affixes
        names = " ".join(tokenizer.convert_ids_to_tokens([*extra]))
        limit = encoder.max_length or longest_text(tokenizer, encoder.positions)[0]
        _refuse(row.text.name, "Change it, or remove the example", {
            "the text is empty": not text.strip(),
            f"the text contains special tokens ({names}), which the tokenizer adds itself": extra,
            f"the text has {len(labels)} tokens, more than {limit} (the limit of the model, the "
            f"tokenizer or {option('max_length')})": len(labels) > limit,
        })  # fmt: skip
        return torch.tensor([labels])

    @cached_property
    def prefix(self) -> list[int]:
        """Tokens between the start token and all texts, such as the language."""
        return [token for token in self._target_ids("") if token not in self.encoder.ends]

    def _target_ids(self, text: str) -> list[int]:
        """Return a text's tokens without the start token."""
        ids = list(self.encoder.tokenizer(text_target=text, verbose=False)["input_ids"])
        return ids[1:] if ids[:1] == [self.start] else ids

    def _read_wave(self, row: Speech) -> Any:
        rate, name = self.processor.sampling_rate, row.text.name
        wave = read_sound(row.audio, name, rate)
        longest = getattr(self.processor, "n_samples", len(wave))  # Whisper's cuts what is longer
        _refuse(name, "Shorten sound and text, or remove the example", {
            f"the sound lasts {len(wave) / rate:.1f} s, but the feature extractor reads only "
            f"{longest / rate:g} s": len(wave) > longest
        })  # fmt: skip
        return wave


def read_sound(audio: Any, name: str, rate: int) -> Any:
    """Read a sound with `soundfile`, and average its channels.

    Args:
        audio: Path of a file in any of the library's formats, or its bytes.
        name: Name of the row in messages.
        rate: Sampling rate of the result.

    Returns:
        Float32 `[samples]`.

    Raises:
        CalibrationError: If the library is missing or cannot read the sound, or the sound has no
            frames, fewer frames than its header promises, or an unusual sampling rate.
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
    fractions = [int(real) / int(size) for size, real in sizes if 0 < int(size) < 2**30]
    fraction = min([len(wave) / max(frames, 1), *fractions])
    # The resampling filter has 20 coefficients per step.
    steps = stored_rate // math.gcd(stored_rate, rate)
    is_usual = 1_000 <= stored_rate <= 192_000 and steps <= 50_000
    _refuse(f"{name}: {file}", "Repair or remove it", {
        "it has no sound": not len(wave),
        f"it has only {fraction:.0%} of the sound that its header declares": fraction < 0.99,
        f"it has an unusual sampling rate, {stored_rate} Hz": not is_usual,
    })  # fmt: skip
    return resample_poly(wave.mean(axis=1), rate, stored_rate)


def _refuse(name: str, advice: str, problems: Mapping[str, object]) -> None:
    """Refuse an example because of the first problem whose condition is true."""
    for problem in (problem for problem, is_true in problems.items() if is_true):
        raise CalibrationError(f"{name}: {problem}. {advice}")
