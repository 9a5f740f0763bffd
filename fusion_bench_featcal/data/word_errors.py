"""Word errors of transcripts, with Whisper's text normalizers and `jiwer`."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any
from unicodedata import category, normalize

from transformers.models.whisper.english_normalizer import (
    BasicTextNormalizer,
    EnglishTextNormalizer,
)

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import install_advice

Normalizer = Callable[[str], str]


def text_normalizer(
    transcripts: Sequence[str], language: str | None = None, spelling: Any = None
) -> Normalizer:
    """Return the normalizer of transformers for transcripts in one language.

    English has a normalizer of its own: `$50` becomes "fifty dollars", and "what's" becomes "what
    is". In other languages, letters become small, and punctuation and symbols become blanks.
    Accents and the vowel signs of Hindi are preserved, which the normalizer of transformers
    replaces by blanks.

    Args:
        transcripts: The texts. Without `language` they are English if all their letters are ASCII.
        language: Whisper's code of the language.
        spelling: British word -> American word, as in Whisper's tokenizers.
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


def word_errors(reference: str, hypothesis: str, normalizer: Normalizer | None = None) -> int:
    """Return the smallest number of inserted, deleted and replaced words between two texts.

    Args:
        reference: The correct transcript.
        hypothesis: The model's transcript.
        normalizer: Result of `text_normalizer`, by default the one for the reference.

    Raises:
        CalibrationError: If `jiwer` is missing.
    """
    normalizer = normalizer or text_normalizer([reference])
    alignment = speech_library("jiwer").process_words(normalizer(reference), normalizer(hypothesis))
    return alignment.substitutions + alignment.deletions + alignment.insertions


def speech_library(name: str) -> Any:
    """Import a library of the extra `speech`.

    Raises:
        CalibrationError: If it is missing.
    """
    try:
        return import_module(name)
    except (ImportError, OSError) as error:  # OSError without libsndfile
        advice = install_advice("'.[speech]'")
        raise CalibrationError(f"audio data needs {name}: {advice}") from error
