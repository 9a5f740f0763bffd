"""Examples of speech: what changes sound or text is used, or refused by name."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_speech import EXTRACTOR, LANGUAGE, RATE, START, sound, soundfile, speech_tokenizer
from tiny_speech import speech_model as whisper
from tiny_texts import WORDS

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.speech import Speech, SpeechBatches, read_sound, read_speech
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_limits import positions_of
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import Seq2SeqTextEncoder

END = WORDS.index("</s>")


def read(row: dict[str, Any], columns: dict[str, str] | None = None) -> Speech:
    return read_speech(TextRows([row], "data", columns), 0, Path("folder"))


@pytest.mark.parametrize("column", [
    "start", "end", "offset", "duration", "language", "task", "prompt", "context", "image",
])  # fmt: skip
def test_columns_that_change_sound_or_text_are_refused(column):
    row = {"audio": "a.wav", "text": "a b", column: 0.5 if column in ("start", "end") else "x"}
    message = rf"^data, example 0: column {column} cannot be used in speech\. .* remove the column$"
    with pytest.raises(CalibrationError, match=message):
        read(row)
    with pytest.raises(CalibrationError, match=message):
        read(row | {"said": "a"}, {"text": "said"})
    assert read(row | {column: None, "speaker": "x"}).text.unread == ("speaker",)


def test_other_columns_are_not_read_if_both_are_named():
    row = {"file": "a.wav", "said": "a b", "language": "cy"}
    example = read(row, {"audio": "file", "text": "said"})
    assert example == Speech(example.text, Path("folder/a.wav"))
    assert (example.text.target, example.text.unread) == ("a b", ("language",))


def labels(text: str, **options: Any) -> list[int]:
    tokenizer = speech_tokenizer()
    tokenizer.add_tokens(["<s>", "<en>"], special_tokens=True)  # so that it finds them in texts
    encoder = Seq2SeqTextEncoder(tokenizer, **options)
    row = Speech(Text("row", "prompt", text, text), b"")
    return SpeechBatches([row], EXTRACTOR, encoder, START).encode_target(row)[0].tolist()


@pytest.mark.parametrize(("text", "tokens"), [
    ("<s> <en> a </s>", "<en> <s> </s>"), ("a </s>", "</s>"), ("a <pad> b", "<pad>"),
])  # fmt: skip
def test_texts_with_special_tokens_are_refused(text, tokens):
    message = rf"^row: the text contains special tokens \({tokens}\), which the tokenizer adds"
    with pytest.raises(CalibrationError, match=message):
        labels(text)
    assert labels("a other") == [LANGUAGE, WORDS.index("a"), WORDS.index("<unk>"), END]


def test_the_longest_text_is_that_of_the_decoder():
    """The encoder has fewer positions. A text of all of the decoder's keeps its end."""
    model: Any = whisper(max_source_positions=6)
    most = model.config.max_target_positions
    assert positions_of(model) == most == 16
    for options in ({"positions": most}, {"positions": 99, "max_length": most}):
        fits = labels("a " * (most - 2), **options)  # beside language and end
        assert len(fits) == most and fits[-1] == END
        message = rf"^row: the text has 17 tokens, more than {most} .* max_length\)\. Change"
        with pytest.raises(CalibrationError, match=message):
            labels("a " * (most - 1), **options)
    features = torch.zeros(1, 4, 12)
    assert model(features, labels=torch.tensor([fits])).logits.shape[1] == most
    with pytest.raises(ValueError, match="maximum allowed length"):
        model(features, labels=torch.tensor([[*fits, END]]))


def written(samples: np.ndarray, kind: str = "WAV", rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["WAV", "AIFF", "AU", "RF64", "MP3"])
def test_sounds_that_are_cut_off_are_refused(kind):
    """The first formats say so in their header, MP3 by fewer frames than it promises."""
    samples = np.tile(sound(1), 8)
    whole = written(samples, kind)
    assert len(read_sound(whole, "row", RATE)) == len(samples)
    for share in (0.1, 0.9):
        message = (
            r"^row: the audio: it has only \d+% of the sound that its header declares\. Repair"
        )
        with pytest.raises(CalibrationError, match=message):
            read_sound(whole[: int(share * len(whole))], "row", RATE)


@pytest.mark.parametrize("size", [b"\xff\xff\xff\xff", b"\x00\xf0\xff\x7f"])
def test_sounds_written_as_streams_are_read(size):
    """Their headers have no sizes: those of ffmpeg, and of sox."""
    whole = written(sound(1))
    place = whole.index(b"data") + 4
    stream = whole[:4] + size + whole[8:place] + size + whole[place + 4 :]
    assert np.array_equal(read_sound(stream, "row", RATE), read_sound(whole, "row", RATE))


def test_sounds_without_samples_and_of_unusual_rates_are_refused(tmp_path: Path):
    empty = tmp_path / "a.wav"
    empty.write_bytes(written(sound(1)[:0]))
    with pytest.raises(CalibrationError, match=r"^row: file .*a\.wav: it has no sound\. Repair"):
        read_sound(empty, "row", RATE)
    for rate in (1, 999, 96_001, 192_001, 999_983, 10**9, 2**31 - 1):
        with pytest.raises(CalibrationError, match=rf"it has an unusual sampling rate, {rate} Hz"):
            read_sound(written(sound(1), rate=rate), "row", RATE)
    for rate in (8_000, 11_025, 22_254, 44_056, 44_100, 48_000, 192_000):
        length = len(read_sound(written(sound(1), rate=rate), "row", RATE))
        assert length == -(-len(sound(1)) * RATE // rate)
