"""Images of datasets, folders and tables become pictures, labels and tensors, or a clear error."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from sample_pools import RESCALE, image_batches, rgb
from tiny_images import SHAPES, picture, write_class_folders

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.pictures import read_image, refuse_depth
from fusion_bench_featcal.tasks import load_images

PICTURE = picture(3)
PICTURES = [(picture(100 * c + n).tobytes(), c) for c in range(3) for n in range(4)]


def file_of(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def plain(mode: str, colour: Any) -> Image.Image:
    return Image.new(mode, (4, 4), colour)


def sideways() -> Image.Exif:
    """Mark of a camera that was held sideways."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


CLEAR = plain("RGBA", (9, 20, 30, 51))
OPAQUE = plain("RGB", (9, 20, 30))  # as pipelines and trainers read it
FORMS: dict[str, tuple[Any, Image.Image]] = {
    "RGB": (PICTURE, PICTURE),
    "as datasets stores it": ({"bytes": file_of(PICTURE), "path": "inside.png"}, PICTURE),
    "grey": (PICTURE.convert("L"), PICTURE.convert("L").convert("RGB")),
    "CMYK": (plain("CMYK", (0, 255, 255, 0)), plain("RGB", "red")),
    "half transparent": (CLEAR, OPAQUE),
    "a file with alpha": (file_of(CLEAR), OPAQUE),
    "palette with alpha": (file_of(CLEAR.quantize(4), transparency=bytes([51] * 4)), OPAQUE),
    "palette with a clear colour": (file_of(CLEAR.quantize(4), transparency=0), OPAQUE),
    "grey with alpha": (file_of(plain("LA", (9, 51))), plain("RGB", (9, 9, 9))),
    "grey with a clear level": (file_of(plain("L", 9), transparency=9), plain("RGB", (9, 9, 9))),
    "rotated": (file_of(PICTURE, exif=sideways()), PICTURE.transpose(Image.Transpose.ROTATE_270)),
}


@pytest.mark.parametrize(("value", "expected"), FORMS.values(), ids=FORMS)
def test_every_form_of_a_picture_becomes_upright_rgb(value, expected):
    np.testing.assert_array_equal(rgb(value), np.asarray(expected))


BAD: list[tuple[Any, Any, str]] = [
    (np.zeros((2, 2, 3), np.uint8), RESCALE, "expected an image, got ndarray.*PIL images, paths"),
    (file_of(PICTURE)[:999], RESCALE, "the image cannot be read as an image .*truncated"),
    ("no.png", RESCALE, r"file no\.png cannot be read .*No such"),
    (PICTURE, lambda _: 1 / 0, r"the processor fails on this 28 x 28 image \(ZeroDivisionError"),
    (PICTURE, lambda _: torch.zeros(3, 4, 4).int(), r"must return .*got torch.int32 \[3, 4, 4\]"),
]


@pytest.mark.parametrize(("image", "processor", "message"), BAD)
def test_unusable_images_and_processors_are_named(image, processor, message):
    with pytest.raises(CalibrationError, match=f"task 'a', .*train.*: .*{message}"):
        list(image_batches([{"image": image}], processor))


# --- folders and tables ---


def test_pictures_that_fill_the_memory_are_refused_by_their_headers(tmp_path: Path):
    """A file of 10 kB would become some copies of 324 MB."""
    Image.new("1", (9000, 9000)).save(tmp_path / "large.png")
    for value in (tmp_path / "large.png", (tmp_path / "large.png").read_bytes()):
        with pytest.raises(CalibrationError, match=r"example 3: .*\(81,000,000 pixels, more") as e:
            read_image(value, "example 3", refuse_depth)
        assert str(e.value).endswith("than 80,000,000). Repair, shrink or remove it")


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
        pictures = [{"bytes": file.read_bytes(), "path": "a.png"} for file in files]
    table = datasets.Dataset.from_dict({"file": pictures, "kind": [f.parent.name for f in files]})
    write = {".csv": table.to_csv, ".jsonl": table.to_json, ".parquet": table.to_parquet}
    path = folder / f"table-{kind}"
    write[path.suffix](path)
    return path


@pytest.mark.parametrize("kind", ["folder", "paths.csv", "paths.jsonl", "bytes.parquet"])
def test_folders_and_tables_give_pictures_and_labels(shapes, kind, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "/dev/null/cache")  # as if read-only
    path = str(shapes if kind == "folder" else write_table(shapes, kind))
    columns: Any = {"image_column": "file", "label_column": "kind"} if kind != "folder" else {}
    items = load_images(path, **columns)
    assert contents(items) == PICTURES
    assert items.classnames == list(SHAPES)
    unlabelled = load_images(path, **columns | {"label_column": None})
    assert (unlabelled.has_labels, list(unlabelled[0])) == (False, ["image"])


@pytest.mark.parametrize("moved", ["circle", "circle/00.png"])
def test_images_in_folders_of_several_depths_are_refused(tmp_path, shapes, moved):
    """They would be left out, or of a class that has the classes."""
    with pytest.raises(ValueError, match=r"has shapes/\S+: images .*give the folder that contains"):
        load_images(str(tmp_path))
    shutil.move(shapes / moved, tmp_path)
    with pytest.raises(
        ValueError, match=r"\d\d\.png and shapes/\S+: images .* must all be in class folders"
    ):
        load_images(str(tmp_path))


def test_a_folder_may_have_splits(tmp_path):
    for seed, split in enumerate(("test", "train")):
        write_class_folders(tmp_path / split, seed=seed)
    assert contents(load_images(str(tmp_path), split="test")) == PICTURES
    assert contents(load_images(str(tmp_path), usual_split="test")) == PICTURES
    with pytest.raises(ValueError, match="has splits: choose one with split, test or train"):
        load_images(str(tmp_path))
    with pytest.raises(ValueError, match=r"no folder for split 'tset' \(nearest: 'test'\)"):
        load_images(str(tmp_path), split="tset")


def write_metadata(folder: Path, ending: str, column: str = "label") -> list[bytes]:
    """Move the images of class folders into one folder with a table of `datasets`' imagefolder."""
    rows = []
    for number, file in enumerate(sorted(folder.glob("*/*.png"))):
        rows.append({"file_name": f"{number}.png", column: file.parent.name, "size": 28})
        file.rename(folder / f"{number}.png")
    for empty in [path for path in folder.iterdir() if path.is_dir()]:
        empty.rmdir()
    table = datasets.Dataset.from_list(rows)
    {"csv": table.to_csv, "jsonl": table.to_json}[ending](folder / f"metadata.{ending}")
    return [picture for picture, _ in PICTURES]


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_folder_may_have_a_table_of_its_images(shapes, ending):
    write_metadata(shapes, ending)
    (shapes / "more.png").write_bytes((shapes / "0.png").read_bytes())
    items = load_images(str(shapes))
    assert contents(items) == PICTURES and items.classnames == list(SHAPES)
    assert contents(load_images(f"{shapes.parent}:shapes")) == PICTURES
    assert contents(load_images(str(shapes), image_column="file_name")) == PICTURES
    assert not load_images(str(shapes), label_column=None).has_labels
    (shapes / "0.png").unlink()
    with pytest.raises(
        CalibrationError, match=r"example 0: file .*0\.png cannot be read .*No such"
    ):
        load_images(str(shapes))[0]


def test_a_table_beside_splits_is_read_as_imagefolder_does(tmp_path):
    """It is not read beside class folders in the splits. Without them there would be no labels."""
    write_class_folders(tmp_path / "train", seed=1)
    write_class_folders(tmp_path / "test", seed=0)
    rows = [{"file_name": "test/circle/00.png", "label": "other"}]
    (tmp_path / "metadata.jsonl").write_text("".join(map(json.dumps, rows)))
    assert contents(load_images(str(tmp_path), usual_split="test")) == PICTURES
    right = datasets.load_dataset(
        "imagefolder", data_dir=str(tmp_path), cache_dir=str(tmp_path / ".cache")
    )
    assert right["test"].features["label"].names == list(SHAPES)
    for split in ("train", "test"):
        for file in (tmp_path / split).glob("*/*.png"):
            file.rename(tmp_path / split / f"{file.parent.name}{file.name}")
        for empty in [path for path in (tmp_path / split).iterdir() if path.is_dir()]:
            empty.rmdir()
    assert not load_images(str(tmp_path), usual_split="test").has_labels
    for ending in ("csv", "jsonl"):
        (tmp_path / "test" / f"metadata.{ending}").write_text("file_name,label\n")
    with pytest.raises(ValueError, match=r"metadata\.csv and metadata\.jsonl: keep only one"):
        load_images(str(tmp_path), usual_split="test")


def test_other_columns_of_such_a_table(shapes):
    write_metadata(shapes, "csv", column="kind")
    assert contents(load_images(str(shapes), label_column="kind")) == PICTURES
    with pytest.raises(ValueError, match="no image column 'img'; the columns are: file_name"):
        load_images(str(shapes), image_column="img", label_column="kind").read(0)


def test_captions_beside_class_folders_are_no_labels(shapes):
    rows = [{"file_name": "circle/00.png", "text": "a circle"}]
    (shapes / "metadata.jsonl").write_text("".join(map(json.dumps, rows)))
    assert contents(load_images(str(shapes))) == PICTURES


@pytest.mark.parametrize("has_splits", [False, True])
def test_saved_datasets_of_images(shapes, tmp_path, has_splits):
    rows: Any = {"image": [picture(100 * c + n) for c in range(3) for n in range(4)]}
    rows["label"] = [c for c in range(3) for _ in range(4)]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(SHAPES))}
    table: Any = datasets.Dataset.from_dict(rows, datasets.Features(features))
    path = str(tmp_path / "saved")
    if not has_splits:
        table.save_to_disk(path)
        assert contents(load_images(path)) == PICTURES
        assert contents(load_images(path, usual_split="train")) == PICTURES
        with pytest.raises(ValueError, match=r"saved' is one table .*: remove split \('test'\)"):
            load_images(path, "test")
        return
    datasets.DatasetDict({"fit": table, "test": table.select([0])}).save_to_disk(path)
    for items in (load_images(path, "fit"), load_images(f"{path}:fit")):
        assert contents(items) == PICTURES and items.classnames == list(SHAPES)
    assert len(load_images(path, usual_split="test")) == 1
    with pytest.raises(ValueError, match=r"has splits: choose one with split, fit or test"):
        load_images(path)


PETS, ABC = ["cat", "dog"], ["a", "b", "c"]
# Labels in the data, configured class names, and the numbers of the classes.
LABELS: list[tuple[list[Any], list[str] | None, Any]] = [
    (["b", "a"], None, [1, 0]),  # sorted as texts
    (["10", "9"], None, [1, 0]),  # numbers are sorted as numbers
    (["a", "b"], ["b", "c", "a"], [2, 0]),
    (["0", "1"], ["1", "0"], [1, 0]),  # known names go before numbers
    (["00", "02"], ABC, [0, 2]),  # numbers from zero are positions
    ([1.0, 0.0], PETS, [1, 0]),
    ([True, False], PETS, [1, 0]),
    (["US", "us"], ["us", "US"], [1, 0]),  # exact names go before folded ones
    (["Us"], ["us", "US"], "example 0: label 'Us' is not one of the 2 classes"),
    (["Caf\u00e9"], ["x", "cafe\u0301"], [1]),  # two forms of one letter
    ([1, 4], ["1", "2", "3", "4"], [0, 3]),  # numbers that are names
    ([1, 0], ["letter 1", "letter 2"], [1, 0]),  # class names are those of the data
    ([1, 1], ["letter 1", "letter 2"], [1, 1]),
    ([0, 4], ["1", "2", "3", "4"], "example 0: label 0 is not one of the 4 classes.*: 1, 2, 3, 4"),
    (["cat", "dogg"], PETS, "example 1: label 'dogg' is not one of the 2 classes .nearest: 'dog"),
    ([0, 2], PETS, "example 1: label 2 is not one of the 2 classes: cat, dog"),
    (["cat", None], PETS, "example 1: label None is not one"),
    ([0.5], PETS, "example 0: label 0.5 is not one"),
    ([0.85], None, "example 0: label 0.85 is not a class number"),
    ([[0, 1]], PETS, r"example 0: label \[0, 1\] is not one of the 2 classes"),
]


@pytest.mark.parametrize(("labels", "classnames", "expected"), LABELS)
def test_labels_become_numbers_of_classes(tmp_path, labels, classnames, expected):
    PICTURE.save(tmp_path / "p.png")
    rows = [json.dumps({"image": "p.png", "label": label}) for label in labels]
    (tmp_path / "labels.jsonl").write_text("\n".join(rows))
    if isinstance(expected, str):
        with pytest.raises(CalibrationError, match=expected):
            load_images(str(tmp_path / "labels.jsonl"), classnames=classnames)
        return
    items = load_images(str(tmp_path / "labels.jsonl"), classnames=classnames)
    assert [item["label"] for item in items] == expected


@pytest.mark.parametrize(
    ("names", "classnames", "expected", "is_warned"),
    [
        (PETS, None, [0, 1], False),
        (PETS, ["dog", "cow", "cat"], [2, 0], False),  # by name
        (["n01", "n02"], PETS, [0, 1], False),  # by number, as in FusionBench
        (["cat", "n02"], ["dog", "cat"], [0, 1], True),  # the order may be another
    ],
)
def test_class_names_of_a_dataset(names, classnames, expected, is_warned, caplog, tmp_path):
    features = {"label": datasets.ClassLabel(names=names), "image": datasets.Image()}
    rows: Any = {"label": [0, 1], "image": [PICTURE] * 2}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    table.save_to_disk(str(tmp_path / "pets"))
    items: Any = load_images(str(tmp_path / "pets"), classnames=classnames)
    assert [items.read(number)[1] for number in range(2)] == expected
    assert items.classnames == (classnames or names)
    assert ("class 'cat' is number 0 in the data but 1 in" in caplog.text) == is_warned


@pytest.mark.parametrize(("path", "options", "message"), [
    ("table.csv", {"split": "test"}, r"one table without splits: remove split \('test'\)"),
    ("table.csv", {"image_column": "fil"}, r"no image column 'fil' \(nearest: 'file'\)"),
    ("table.csv", {"image_column": "file"}, r"example 0: file .*circle/00\.png cannot"),
    ("empty", {}, r"data 'empty' has no images: images \(\.avif, "),
    ("./no/such", {}, r"data '\./no/such' is neither a file nor"),
    ("who/what", {"split": "test"}, r"'who/what', split 'test'.*HF_HUB_OFFLINE"),
])  # fmt: skip
def test_paths_without_readable_images_are_refused(shapes, path, options, message, monkeypatch):
    monkeypatch.chdir(shapes)
    write_table(shapes, "paths.csv").rename("table.csv")
    Path("empty/class").mkdir(parents=True)
    Path("circle/00.png").unlink()
    with pytest.raises((ValueError, CalibrationError), match=message):
        load_images(path, **options)[0]
