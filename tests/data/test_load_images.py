"""Folders, tables and hub ids give the same pictures and labels, or a clear error."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image
from tiny_images import SHAPES, picture, write_class_folders

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.tasks import load_images

REFUSALS = (ValueError, CalibrationError)
TWELVE = [str(number) for number in range(12)]
PICTURES = [(picture(100 * c + n).tobytes(), c) for c in range(3) for n in range(4)]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Local files are read where no cache can be written, as in a read-only home."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "/dev/null/cache")


@pytest.fixture
def shapes(tmp_path) -> Path:
    """Three classes of four pictures."""
    return write_class_folders(tmp_path / "shapes")


def contents(items: Any) -> list[tuple[bytes, int]]:
    return [(item["image"].tobytes(), item["label"]) for item in map(items.__getitem__, range(12))]


def write_table(folder: Path, suffix: str) -> Path:
    """A table of a folder's classes, with paths relative to the folder."""
    files = sorted(folder.rglob("*.png"))
    rows = [{"file": str(f.relative_to(folder)), "kind": f.parent.name} for f in files]
    table, path = datasets.Dataset.from_list(rows), folder / f"table{suffix}"
    {".csv": table.to_csv, ".parquet": table.to_parquet}[suffix](path)
    return path


@pytest.mark.parametrize("suffix", ["", ".csv", ".parquet"])
def test_folders_and_tables_give_pictures_and_labels(shapes, suffix, monkeypatch, tmp_path):
    path = str(write_table(shapes, suffix) if suffix else shapes)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # paths are relative to the table, not to us
    columns: Any = {"image_column": "file", "label_column": "kind"} if suffix else {}
    items = load_images(path, **columns)
    assert contents(items) == PICTURES
    assert items.classnames == list(SHAPES)
    unlabelled = load_images(path, **columns | {"label_column": None})
    assert (unlabelled.has_labels, list(unlabelled[0])) == (False, ["image"])


def test_one_folder_of_pictures_is_unlabelled_and_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    picture(0, (20, 10)).save(tmp_path / "sideways.png", exif=exif)
    (item,) = load_images(str(tmp_path))
    assert list(item) == ["image"] and item["image"].size == (10, 20)


def test_split_folders(tmp_path):
    for seed, split in enumerate(("test", "train")):
        write_class_folders(tmp_path / split, seed=seed)
    assert contents(load_images(str(tmp_path), split="test")) == PICTURES
    with pytest.raises(ValueError, match="has splits: set split to test or train"):
        load_images(str(tmp_path))
    with pytest.raises(ValueError, match=r"no folder for split 'tset' \(nearest: 'test'\)"):
        load_images(str(tmp_path), split="tset")


@pytest.mark.parametrize(
    ("folders", "classnames", "by", "expected"),
    [
        (TWELVE, None, "name", list(range(12))),  # numbers are sorted as numbers
        (["00", "02"], ["a", "b", "c"], "name", [0, 2]),  # numbers from zero are positions
        (["a", "b"], ["b", "c", "a"], "name", [2, 0]),  # all known
        (["a", "b"], ["b", "a"], "order", [0, 1]),  # order goes before names
        (["cat", "dog", "x"], ["cat", "dog", "y"], "name", [0, 1, 2]),  # common ones in place
    ],
)
def test_class_folders_are_matched_to_class_names(tmp_path, folders, classnames, by, expected):
    write_class_folders(tmp_path, folders, per_class=1)
    items = load_images(str(tmp_path), classnames=classnames, classnames_by=by)
    assert [item["label"] for item in items] == expected
    assert items.classnames == (classnames or folders)
    expected_pictures = [picture(100 * n).tobytes() for n in range(len(folders))]
    assert [item["image"].tobytes() for item in items] == expected_pictures


def test_class_folders_that_could_be_swapped_are_refused(tmp_path):
    write_class_folders(tmp_path, ["n01", "n02"], per_class=1)
    with pytest.raises(ValueError, match=r"do not match\. No class name: 'n01'.*_by: order"):
        load_images(str(tmp_path), classnames=["cat", "dog"])


@pytest.mark.parametrize(
    ("labels", "classnames", "expected"),
    [
        (["b", "a", "b"], None, ([1, 0, 1], ["a", "b"])),
        (["10", "9"], None, ([1, 0], ["9", "10"])),
        (["1", "0"], ["cat", "dog"], ([1, 0], ["cat", "dog"])),
        ([0, 4], None, ([0, 4], None)),
        ([0, 2], ["cat", "dog"], r"item 1: label 2 is out of range \(0\.\.1"),
        (["cat", "dogg"], ["cat", "dog"], "1: label 'dogg' is none of the 2 class names.*'dog'"),
    ],
)
def test_a_column_of_labels(tmp_path, labels, classnames, expected):
    picture(0).save(tmp_path / "p.png")
    rows = [json.dumps({"image": "p.png", "label": label}) for label in labels]
    (tmp_path / "labels.jsonl").write_text("\n".join(rows))
    if isinstance(expected, str):
        with pytest.raises(CalibrationError, match=expected):
            load_images(str(tmp_path / "labels.jsonl"), classnames=classnames)
        return
    items = load_images(str(tmp_path / "labels.jsonl"), classnames=classnames)
    assert ([item["label"] for item in items], items.classnames) == expected


def test_damaged_and_missing_files_are_named(shapes):
    table = str(write_table(shapes, ".csv"))
    whole = (shapes / "square" / "01.png").read_bytes()
    (shapes / "square" / "01.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CalibrationError, match=r"item 5: image file .*square/01\.png cannot be re"):
        load_images(str(shapes))[5]
    (shapes / "circle" / "00.png").unlink()
    message = r"1 of 12 image files do not exist; .*item 0, .*circle/00\.png \(relative paths"
    with pytest.raises(CalibrationError, match=message):
        load_images(table, image_column="file")


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("table.csv", {"split": "test"}, r"one table without splits: remove split \('test'\)"),
        ("table.csv", {"image_column": "fil"}, r"no image_column 'fil' \(nearest: 'file'\)"),
        ("broken.jsonl", {}, r"broken\.jsonl' is not readable as json"),
        ("./no/such", {}, r"data '\./no/such' does not exist"),
        ("shapes/trian", {}, r"neither.*: correct the path, or, if .* split .*train or test\)$"),
        ("who/what", {"split": "test"}, r"'who/what', split 'test'.*HF_HUB_OFFLINE"),
    ],
)
def test_refused_paths(shapes, path, options, message, monkeypatch):
    monkeypatch.chdir(shapes)
    write_table(shapes, ".csv")
    (shapes / "broken.jsonl").write_text('{"image": ')
    with pytest.raises(REFUSALS, match=message):
        load_images(path, **options)[0]
