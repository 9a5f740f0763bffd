"""Folders and tables give the same pictures and labels, or a clear error."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image
from tiny_images import SHAPES, picture, write_class_folders

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.tasks import load_images

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


def write_table(folder: Path, kind: str) -> Path:
    """A table of the classes of a folder: paths relative to the folder, or whole images."""
    files = sorted(folder.rglob("*.png"))
    pictures: list[Any] = [str(file.relative_to(folder)) for file in files]
    if kind == "bytes.parquet":
        pictures = [file.read_bytes() for file in files]
    elif kind == "decoded.parquet":
        pictures = [{"bytes": file.read_bytes(), "path": "a.png"} for file in files]
    table = datasets.Dataset.from_dict({"file": pictures, "kind": [f.parent.name for f in files]})
    if kind == "decoded.parquet":
        table = table.cast_column("file", datasets.Image())
    write = {".csv": table.to_csv, ".jsonl": table.to_json, ".parquet": table.to_parquet}
    path = folder / f"table-{kind}"
    write[path.suffix](path)
    return path


KINDS = ("folder", "paths.csv", "paths.jsonl", "paths.parquet", "bytes.parquet", "decoded.parquet")


@pytest.mark.parametrize("kind", KINDS)
def test_folders_and_tables_give_pictures_and_labels(shapes, kind, monkeypatch, tmp_path):
    path = str(shapes if kind == "folder" else write_table(shapes, kind))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # paths are relative to the table
    columns: Any = {"image_column": "file", "label_column": "kind"} if kind != "folder" else {}
    items = load_images(path, **columns)
    assert contents(items) == PICTURES
    assert items.classnames == list(SHAPES)
    assert contents(load_images(path, **columns, classnames=["star", *SHAPES[:2]])) == [
        (pixels, (label + 1) % 3) for pixels, label in PICTURES
    ]
    unlabelled = load_images(path, **columns | {"label_column": None})
    assert (unlabelled.has_labels, list(unlabelled[0])) == (False, ["image"])


def test_a_folder_may_have_splits_or_pictures_without_labels(tmp_path):
    for seed, split in enumerate(("test", "train")):
        write_class_folders(tmp_path / split, seed=seed)
    assert contents(load_images(str(tmp_path), split="test")) == PICTURES
    with pytest.raises(ValueError, match="has splits: set split to test or train"):
        load_images(str(tmp_path))
    with pytest.raises(ValueError, match=r"no folder for split 'tset' \(nearest: 'test'\)"):
        load_images(str(tmp_path), split="tset")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    (tmp_path / "flat").mkdir()
    picture(0, (20, 10)).save(tmp_path / "flat" / "sideways.png", exif=exif)
    (item,) = load_images(str(tmp_path / "flat"))
    assert list(item) == ["image"] and item["image"].size == (10, 20)


def write_labels(folder: Path, labels: list[Any]) -> Path:
    """A table of one picture with several labels."""
    picture(0).save(folder / "p.png")
    rows = [json.dumps({"image": "p.png", "label": label}) for label in labels]
    (folder / "labels.jsonl").write_text("\n".join(rows))
    return folder / "labels.jsonl"


PETS, ABC = ["cat", "dog"], ["a", "b", "c"]
# Labels in the data, configured class names, and the numbers of the classes.
LABELS: list[tuple[list[Any], list[str] | None, Any]] = [
    (["b", "a"], None, [1, 0]),  # sorted as texts
    (TWELVE, None, list(range(12))),  # numbers are sorted as numbers
    (["010", "009"], None, [1, 0]),  # and may begin with zeros
    (["a", "b"], ["b", "c", "a"], [2, 0]),
    (["0", "1"], ["1", "0"], [1, 0]),  # known names go before numbers
    (["00", "02"], ABC, [0, 2]),  # numbers from zero are positions
    (["1", "2"], ABC, "item [01]: label '1' is neither one of 3 class names"),
    (["cat", "dogg"], PETS, "item [01]: label 'dogg' is neither one of 2 class names .nearest: 'd"),
]
NUMBERS: list[tuple[list[Any], list[str] | None, Any]] = [
    ([0, 4], None, [0, 4]),
    ([1.0, 0.0], PETS, [1, 0]),
    ([True, False], PETS, [1, 0]),
    ([0, 2], PETS, "item 1: label 2 is neither .* nor a number from 0 to 1"),
    ([0, -1], None, "item 1: label -1 is neither a class name nor a number from 0"),
    ([0, None], PETS, "item 1: label .* is neither"),
    (["cat", None], PETS, "item 1: label None is neither"),
    ([0.5], PETS, "item 0: label 0.5 is neither"),
    ([[1, 0]], PETS, r"item 0: label \[1, 0\] is neither"),
]


@pytest.mark.parametrize(
    ("kind", "labels", "classnames", "expected"),
    [("folders", *row) for row in LABELS] + [("table", *row) for row in LABELS + NUMBERS],
)
def test_labels_become_numbers_of_classes(tmp_path, kind, labels, classnames, expected):
    path = tmp_path
    if kind == "folders":
        write_class_folders(tmp_path, labels, per_class=1)
    else:
        path = write_labels(tmp_path, labels)
    if isinstance(expected, str):
        with pytest.raises(CalibrationError, match=expected):
            load_images(str(path), classnames=classnames)
        return
    items, order = load_images(str(path), classnames=classnames), expected
    if classnames is None and isinstance(labels[0], str):  # of the data, in the order of numbers
        classnames = [labels[expected.index(n)] for n in range(len(labels))]
        order = sorted(expected) if kind == "folders" else expected
    assert [item["label"] for item in items] == order
    assert items.classnames == classnames


@pytest.mark.parametrize(
    ("names", "classnames", "expected", "is_warned"),
    [
        (PETS, None, [0, 1], False),
        (PETS, ["dog", "cow", "cat"], [2, 0], False),  # by name
        (["n01", "n02"], PETS, [0, 1], False),  # by number, as in FusionBench
        (["n01", "cat"], PETS, [0, 1], True),  # the class names may be in a wrong order
    ],
)
def test_class_names_of_a_dataset(names, classnames, expected, is_warned, caplog):
    features = datasets.Features({"label": datasets.ClassLabel(names=names)})
    table = datasets.Dataset.from_dict({"label": [0, 1]}, features=features)
    table = table.add_column("image", [{"bytes": None, "path": "p.png"}] * 2)  # type: ignore[call-arg]
    items = ImageItems(table, name="pets", classnames=classnames)
    assert [items.read(number)[1] for number in range(2)] == expected
    assert items.classnames == (classnames or names)
    warned = ["pets: class 'cat' has number 1 there and 0 in the class names, which is used"]
    assert [record.getMessage() for record in caplog.records] == warned * is_warned


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("table.csv", {"split": "test"}, r"one table without splits: remove split \('test'\)"),
        ("table.csv", {"image_column": "fil"}, r"no column 'fil' of images \(nearest: 'file'\)"),
        (
            "table.csv",
            {"image_column": "file"},
            r"item 0: there is no file .*circle/00\.png \(rela",
        ),
        ("cut", {}, r"item 0: file .*01\.png cannot be read"),
        ("empty", {}, r"data 'empty' has no images \(\.avif, .*neither in itself nor in class"),
        ("mixed", {}, r"has images \(a\.png, \.\.\.\) beside class folders \(b\): move them"),
        ("broken.jsonl", {}, r"broken\.jsonl' is not readable as json"),
        ("./no/such", {}, r"data '\./no/such' does not exist"),
        ("shapes/trian", {}, r"neither.*: correct the path, or, if .* split .*train or test\)$"),
        ("who/what", {"split": "test"}, r"'who/what', split 'test'.*HF_HUB_OFFLINE"),
    ],
)
def test_paths_without_readable_images_are_refused(shapes, path, options, message, monkeypatch):
    monkeypatch.chdir(shapes)
    write_table(shapes, "paths.csv").rename(shapes / "table.csv")
    for folder in ("empty/class", "mixed/b", "cut"):
        (shapes / folder).mkdir(parents=True)
    for file in ("mixed/a.png", "mixed/b/c.png", "empty/class/.hidden.png"):
        picture(0).save(shapes / file)
    whole = (shapes / "circle" / "00.png").read_bytes()
    (shapes / "cut" / "01.png").write_bytes(whole[: len(whole) // 2])
    (shapes / "circle" / "00.png").unlink()
    (shapes / "broken.jsonl").write_text('{"image": ')
    with pytest.raises((ValueError, CalibrationError), match=message):
        load_images(path, **options)[0]
