"""The shipped data: whole, listed, disjoint, and written as the suites' processors read it."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from fusion_bench_featcal.suites import image, text

ROOT = Path(image.path()).parents[1]


def test_shipped_files_are_whole_all_listed_and_no_pickles():
    listing = (ROOT / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    files = [file for file in ROOT.rglob("*") if file.is_file()]
    listed = {"SHA256SUMS"}
    for line in listing:
        digest, _, name = line.partition("  ")
        assert hashlib.sha256((ROOT / name).read_bytes()).hexdigest() == digest, name
        listed.add(name)
    assert listed == {file.relative_to(ROOT).as_posix() for file in files}
    suffixes = {".npz", ".parquet", ".safetensors", ".json", ".txt", ".md", ""}
    assert {file.suffix for file in files} <= suffixes


@pytest.mark.parametrize("task", image.ALL8)
def test_pictures_are_in_the_tasks_colours_and_in_one_split(task):
    arrays = image.load_arrays(task)
    train, test = (
        [picture.tobytes() for picture in arrays.rows(split)[0]] for split in ("train", "test")
    )
    # notMNIST has fonts that differ in name only; ORIGINS.md says so
    shared = set(train).intersection(test)
    assert sum(picture in shared for picture in test) == (14 if task == "mini_notmnist" else 0)
    colours, item = image.find_task(task), image.load_split(task, "test")[3]
    pixels = np.asarray(item["image"])
    assert item["image"].mode == "RGB" and pixels.shape == (28, 28, 3)
    assert isinstance(item["label"], int)
    low, high = (np.minimum(colours.paper, colours.ink), np.maximum(colours.paper, colours.ink))
    assert (pixels >= low).all() and (pixels <= high).all()


def test_no_text_is_in_two_splits_of_any_tasks():
    rows = [text.load_rows(task) for task in text.TA6]
    texts = {
        split: {text.plain_words(written) for row in rows for written, _ in row[split]}
        for split in text.SPLITS
    }
    assert not texts["train"] & (texts["calibration"] | texts["test"])
    assert not texts["calibration"] & texts["test"]


@pytest.mark.parametrize("suite", text.SUITES)
def test_texts_come_back_from_their_tokens(suite):
    tokenizer = AutoTokenizer.from_pretrained(text.path(suite))
    for task in text.TA6[::2]:
        rows = text.load_text_split(task, "test")[::3]
        for column in ("prompt", "target"):
            encoded = tokenizer(rows[column])["input_ids"]
            assert not any(tokenizer.unk_token_id in row for row in encoded)
            assert tokenizer.batch_decode(encoded, skip_special_tokens=True) == rows[column]
