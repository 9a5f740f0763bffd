"""The shipped text tasks: whole, disjoint, and written as prompts and label words."""

from collections import Counter

import pytest

from fusion_bench_featcal.suites import load_text_split, text

SIZES = {
    "snips_intent": (1569, 512, 694, 7),
    "banking77": (2259, 272, 456, 35),
    "clinc_domain": (3845, 512, 1000, 10),
    "clinc_home": (1489, 256, 450, 15),
    "clinc_work": (1499, 256, 450, 15),
    "clinc_auto": (1498, 256, 450, 15),
}


def words_of(task: str, split: str) -> list[str]:
    return [text.plain_words(written) for written, _ in text.load_rows(task)[split]]


@pytest.mark.parametrize("task", text.TA6)
def test_each_task_has_its_rows_and_labels(task):
    rows = text.load_rows(task)
    labels = {split: {label for _, label in rows[split]} for split in text.SPLITS}
    assert (*(len(rows[split]) for split in text.SPLITS), len(labels["train"])) == SIZES[task]
    assert len(rows["calibration"]) >= 256
    assert labels["calibration"] | labels["test"] <= labels["train"]
    assert all(written.strip() for split in text.SPLITS for written, _ in rows[split])


def test_no_text_is_in_two_splits_of_any_tasks():
    found = {
        split: {words for task in text.TA6 for words in words_of(task, split)}
        for split in text.SPLITS
    }
    assert not found["train"] & (found["calibration"] | found["test"])
    assert not found["calibration"] & found["test"]


@pytest.mark.parametrize("task", text.TA6)
def test_no_text_comes_twice_in_a_task(task):
    counts = Counter(words for split in text.SPLITS for words in words_of(task, split))
    assert counts.most_common(1)[0][1] == 1


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
