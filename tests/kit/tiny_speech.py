"""Tiny Whisper models, their tokenizer and feature extractor, and rows of sounds."""

import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from model_types import KINDS
from tiny_models import scatter
from tiny_texts import WORDS, word_tokenizer
from tokenizers import processors

soundfile = pytest.importorskip("soundfile", reason="extra `speech`")

RATE, ROWS = 16_000, 30
START, LANGUAGE = len(WORDS), len(WORDS) + 1
EXTRACTOR = hf.WhisperFeatureExtractor(feature_size=4, chunk_length=1)


def speech_tokenizer() -> Any:
    """Each text begins with a start and a language, and ends in `</s>`, as Whisper's."""
    tokenizer = word_tokenizer(words=(*WORDS, "<s>", "<en>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <en> $A </s>",
        special_tokens=[("<s>", START), ("<en>", LANGUAGE), ("</s>", 1)],
    )
    return tokenizer


def speech_processor() -> Any:
    """Its two parts, as those of transformers have them."""
    return SimpleNamespace(feature_extractor=EXTRACTOR, tokenizer=speech_tokenizer())


def speech_model(seed: int = 0, **more: Any) -> Any:
    sizes: Any = KINDS["speech model"][2]
    sizes = sizes | {"max_source_positions": 50, "decoder_start_token_id": START} | more
    torch.manual_seed(seed)
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes))
    return scatter(model.eval(), seed, 0.05)


def sound(number: int) -> np.ndarray:
    """A tone and noise, 16 bits."""
    times = np.arange(RATE // 4) / RATE
    noise = np.random.default_rng(number).normal(size=times.shape)
    tone = np.sin(2 * np.pi * (200 + 40 * number) * times)
    return np.round(4000 * (tone + noise)).clip(-32_768, 32_767).astype(np.int16)


def speech_rows(folder: Path, task: int) -> list[dict[str, Any]]:
    """Rows whose sounds are WAV and FLAC files of a folder."""
    letters, rows = WORDS[3:], list[dict[str, Any]]()
    for n in range(ROWS):
        name, samples = f"{task}-{n}.{'flac' if n % 2 else 'wav'}", sound(100 * task + n)
        if n % 2:
            soundfile.write(folder / name, samples, RATE)
        else:
            with wave.open(str(folder / name), "wb") as file:
                file.setparams((1, 2, RATE, 0, "NONE", ""))
                file.writeframes(samples.tobytes())
        said = " ".join(letters[(7 * task + n * k) % 20] for k in range(1, 3 + n % 4))
        rows.append({"audio": name, "text": said})
    return rows
