"""The shipped data: whole, listed, disjoint, and written as the suites' processors read it."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from fusion_bench_featcal.suites import image, text

ROOT = Path(image.path()).parents[1]


def test_shipped_files_are_whole_and_all_listed():
    listed = {"SHA256SUMS"}
    for line in (ROOT / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        assert hashlib.sha256((ROOT / name).read_bytes()).hexdigest() == digest, name
        listed.add(name)
    assert listed == {f.relative_to(ROOT).as_posix() for f in ROOT.rglob("*") if f.is_file()}


@pytest.mark.parametrize("task", image.ALL8)
def test_pictures_are_in_the_tasks_colours_and_in_one_split(task):
    arrays = image.load_arrays(task)
    train, test = (
        [picture.tobytes() for picture in arrays.rows(split)[0]] for split in ("train", "test")
    )
    # notMNIST has fonts that differ in name only; ORIGINS.md says so
    shared = set(train).intersection(test)
    assert sum(picture in shared for picture in test) == (14 if task == "mini_notmnist" else 0)
    colours, item = image.TASKS[task], image.load_split(task, "test")[3]
    pixels = np.asarray(item["image"])
    assert item["image"].mode == "RGB" and pixels.shape == (28, 28, 3)
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
