"""The shipped text tasks: whole, disjoint, and written as prompts and label words."""

import pytest

from fusion_bench_featcal.suites import load_text_split, text


def words_of(task: str, split: str) -> list[str]:
    return [text.plain_words(written) for written, _ in text.load_rows(task)[split]]


def test_no_text_is_in_two_splits_of_any_tasks():
    found = {
        split: {words for task in text.TA6 for words in words_of(task, split)}
        for split in text.SPLITS
    }
    assert not found["train"] & (found["calibration"] | found["test"])
    assert not found["calibration"] & found["test"]


def test_rows_are_prompts_in_small_letters_and_targets_in_capitals():
    rows = load_text_split("clinc_home", "test")
    assert rows.column_names == ["prompt", "target"]
    assert len(rows) == 450
    for prompt, target in zip(rows["prompt"], rows["target"], strict=True):
        assert prompt.startswith("home intent : ")
        assert prompt == prompt.lower() and prompt.isascii()
        assert target == target.upper()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("What's THIS song?", "what ' s this song ?"),
        ("  It\u2019s   \u201cfine\u201d ", 'it \' s " fine "'),
        ("caf\u00e9 for 3:30", "cafe for 3 : 30"),
        ("\u00a35", "5"),
    ],
)
def test_words_and_punctuation_are_set_apart(written, expected):
    assert text.plain_words(written) == expected
    assert text.plain_words(expected) == expected


def test_wrong_names_are_refused_with_the_right_ones():
    with pytest.raises(ValueError, match="no text task 'sst2'; there are snips_intent"):
        load_text_split("sst2", "test")
    with pytest.raises(ValueError, match="no banking77 split 'val'; there are train, calib"):
        load_text_split("banking77", "val")
