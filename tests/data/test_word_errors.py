"""Errors of words: texts are compared in the words of Whisper's normalizers."""

import sys
from unittest import mock

import pytest

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.word_errors import text_normalizer, word_errors

HINDI = "मैं घर जा रहा"


@pytest.mark.parametrize(("said", "written", "errors"), [
    ("What's my balance?", "what\u2019s my balance", 0),
    ("What's my balance?", "what is my balance", 0),
    ("fifty dollars", "$50", 0),
    ("twenty one, please", "21 please", 0),
    ("one two three", "two three", 1),
    ("one, four and three", "one, four, two and three", 1),
    ("yes, please", "", 2),
    ("", "a b", 2),
    ("Tŷ, a b c", "c b a tŷ", 4),
    ("Tŷ", "ty", 1),
    (f"{HINDI}।", HINDI, 0),
    (HINDI, "में घार जा रहि", 3),
    (HINDI, "", 4),
])  # fmt: skip
def test_words_are_compared(said, written, errors):
    assert word_errors(said, written) == errors


def test_the_language_decides_by_which_words():
    """Without one, transcripts in ASCII letters are English. Signs do not count."""
    numbers = "twenty um"
    assert text_normalizer([numbers])(numbers).split() == ["20"]
    assert text_normalizer([numbers, "£5"])(numbers).split() == ["20"]
    assert text_normalizer([numbers, "Tŷ"])(numbers).split() == numbers.split()
    assert text_normalizer([numbers, "Tŷ"], "en")(numbers).split() == ["20"]
    assert text_normalizer([numbers], "de")(numbers).split() == numbers.split()
    spelling = {"colour": "color"}
    assert word_errors("colour", "color", text_normalizer(["colour"], "en", spelling)) == 0


def test_a_missing_library_is_named():
    with mock.patch.dict(sys.modules, {"jiwer": None}):
        command = r"pip install '\.\[speech\]' in a checkout of fusion_bench_featcal"
        message = rf"^audio data needs jiwer: {command}$"
        with pytest.raises(CalibrationError, match=message):
            word_errors("a", "b")
