"""Scores by the words of transcripts: word accuracy, and each example's part in it."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from model_types import KINDS, SIZES
from tiny_speech import EXTRACTOR, LANGUAGE, RATE, START, sound, soundfile
from tiny_speech import speech_model as whisper
from tiny_speech import speech_tokenizer as tokenizer
from tiny_texts import WORDS

from fusion_bench_featcal.data.speech import Speech, SpeechBatches
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_samples import Seq2SeqTextEncoder
from fusion_bench_featcal.data.transcripts import TranscriptScorer

SAID = ("a b", "c d e f", "g")


def examples(folder: Path, extractor: Any, start: int) -> SpeechBatches:
    rows = []
    for number, text in enumerate(SAID):
        file = folder / f"{number}.wav"
        soundfile.write(file, sound(number)[: 2000 + 500 * number], RATE)
        rows.append(Speech(Text("row", "prompt", text, text), file))
    return SpeechBatches(rows, extractor, Seq2SeqTextEncoder(tokenizer()), start)


@pytest.mark.parametrize("size", [1, 2])
def test_each_example_has_its_part_in_the_word_accuracy(tmp_path: Path, size: int):
    written = iter(["a b", "c d f g", ""])
    model = whisper()

    def generate(*, encoder_outputs: Any, decoder_input_ids: Any, max_new_tokens: int, **_: Any):
        number = len(encoder_outputs[0])
        assert decoder_input_ids.tolist() == [[START, LANGUAGE]] * number
        assert max_new_tokens == 2 * (4 + 2)  # with language and end
        texts = [next(written).split() for _ in range(number)]
        tokens = [[START, LANGUAGE, *map(WORDS.index, words), 1] for words in texts]
        return torch.tensor([row + [0] * (7 - len(row)) for row in tokens])

    with mock.patch.object(model, "generate", generate):
        score = TranscriptScorer(examples(tmp_path, EXTRACTOR, START), size).score(model)
    assert score.correct is None and score.terms is not None
    # Two of seven words are wrong in the second example, one in the third.
    assert score.accuracy == pytest.approx(4 / 7)
    assert score.terms.tolist() == pytest.approx([1, 1 - 3 * 2 / 7, 1 - 3 / 7])
    assert score.losses.shape == (3,) and score.losses.dtype == torch.float64


def test_the_longest_transcript_fits_the_decoder(tmp_path: Path):
    """A decoder with few positions writes up to the last one."""
    model = whisper(max_target_positions=7, eos_token_id=None)
    score = TranscriptScorer(examples(tmp_path, EXTRACTOR, START)).score(model)
    assert score.losses.isfinite().all() and score.accuracy >= 0


def test_models_of_waves_are_scored(tmp_path: Path):
    """Moonshine's sounds are as long as they are, with a mask."""
    sizes: Any = KINDS["speech model of waves"][2] | SIZES
    layers = {
        f"{side}_{key}": 2
        for side in ("encoder", "decoder")
        for key in ("num_hidden_layers", "num_attention_heads")
    }
    torch.manual_seed(0)
    config = hf.MoonshineConfig(**(sizes | layers | {"vocab_size": len(WORDS) + 2}))
    model = hf.MoonshineForConditionalGeneration(config).eval()
    extractor = hf.Wav2Vec2FeatureExtractor(return_attention_mask=True, sampling_rate=RATE)
    score = TranscriptScorer(examples(tmp_path, extractor, START)).score(model)
    assert score.losses.isfinite().all() and score.terms is not None
