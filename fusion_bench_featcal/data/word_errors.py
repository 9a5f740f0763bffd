"""Errors of words in transcripts, by Whisper's normalizers of texts and `jiwer`."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any
from unicodedata import category, normalize

from transformers.models.whisper.english_normalizer import (
    BasicTextNormalizer,
    EnglishTextNormalizer,
)

from fusion_bench_featcal.errors import CalibrationError


def text_normalizer(
    transcripts: Sequence[str], language: str | None = None, spelling: Any = None
) -> Callable[[str], str]:
    """Return the normalizer of transformers for transcripts in one language.

    English has its own: `$50` is "fifty dollars", and "what's" is "what is". In other languages,
    letters become small, and punctuation and symbols become blanks. Accents and the vowel signs of
    Hindi stay, which the normalizer itself would replace by blanks.

    Args:
        transcripts: Without a language they are English if all their letters are ASCII.
        language: The language's code in Whisper.
        spelling: British to American words, as Whisper's tokenizers have them.
    """
    if language is None and all(c.isascii() or not c.isalpha() for t in transcripts for c in t):
        language = "en"
    if language == "en":
        english = EnglishTextNormalizer(dict(spelling or {}))
        return lambda text: english(text.replace("\u2019", "'"))
    basic: Any = BasicTextNormalizer()
    basic.clean = lambda text: "".join(
        " " if category(c)[0] in "PS" else c for c in normalize("NFKC", text)
    )
    return basic


def word_errors(spoken: str, written: str, normalizer: Callable[[str], str] | None = None) -> int:
    """Return the smallest number of inserted, deleted and replaced words between two texts.

    Args:
        spoken: The transcript.
        written: The text that is compared with it.
        normalizer: As of `text_normalizer`, by default that for the transcript.

    Raises:
        CalibrationError: If `jiwer` is missing.
    """
    normalizer = normalizer or text_normalizer([spoken])
    compared = speech_library("jiwer").process_words(normalizer(spoken), normalizer(written))
    return compared.substitutions + compared.deletions + compared.insertions


def speech_library(name: str) -> Any:
    """Import a library of the extra `speech`.

    Raises:
        CalibrationError: If it is missing.
    """
    try:
        return import_module(name)
    except (ImportError, OSError) as error:  # OSError without libsndfile
        advice = "pip install 'fusion_bench_featcal[speech]'"
        raise CalibrationError(f"sounds need {name}: {advice}") from error
