"""Folders, tables and hub ids give the same pictures and labels, or say what is wrong."""

import io
import json

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import SHAPES, picture, write_class_folders

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.data.pictures import to_rgb
from fusion_bench_featcal.tasks import load_images


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets_cache")


def contents(items: ImageItems) -> list[tuple[bytes, int]]:
    read = [items[index] for index in range(len(items))]
    assert all(item["image"].mode == "RGB" for item in read)
    return [(item["image"].tobytes(), item["label"]) for item in read]


def rows_of(folder):
    """Table rows for a folder of classes, with paths relative to the folder."""
    files = sorted(folder.rglob("*.png"))
    return [{"file": str(f.relative_to(folder)), "kind": f.parent.name} for f in files]


def write_table(folder, suffix):
    table = datasets.Dataset.from_list(rows_of(folder))
    path = folder / f"table{suffix}"
    {".jsonl": table.to_json, ".csv": table.to_csv, ".parquet": table.to_parquet}[suffix](path)
    return str(path)


def test_folder_of_classes(shapes):
    items = load_images(str(shapes))
    assert items.classnames == list(SHAPES)
    expected = [(100 * c + n, c) for c in range(3) for n in range(4)]
    assert contents(items) == [(picture(seed).tobytes(), label) for seed, label in expected]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_tables_give_what_the_folder_gives(shapes, suffix, monkeypatch, tmp_path):
    table = write_table(shapes, suffix)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # paths are relative to the table, not to us
    items = load_images(table, image_column="file", label_column="kind")
    assert contents(items) == contents(load_images(str(shapes)))
    assert items.classnames == list(SHAPES)


def test_parquet_with_the_images_inside(shapes, tmp_path):
    rows = [
        {"image": {"bytes": (shapes / r["file"]).read_bytes(), "path": None}, "label": r["kind"]}
        for r in rows_of(shapes)
    ]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(SHAPES))}
    )
    path = tmp_path / "inside.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    assert contents(load_images(str(path))) == contents(load_images(str(shapes)))


def test_classnames_renumber_labels_by_name(shapes):
    items = load_images(str(shapes), classnames=["star", "circle", "square"])
    assert [items[index]["label"] for index in (0, 4, 8)] == [1, 2, 0]


def test_classnames_replace_folder_names_in_order_only_when_told(shapes):
    others = ["a ring", "a box", "a sun"]
    with pytest.raises(ValueError, match=r"No class name: 'circle'\. .*classnames_by: order"):
        load_images(str(shapes), classnames=others)
    items = load_images(str(shapes), classnames=others, classnames_by="order")
    assert [items[index]["label"] for index in (0, 4, 8)] == [0, 1, 2]
    with pytest.raises(ValueError, match="classnames_by must be name or order, got 'place'"):
        load_images(str(shapes), classnames_by="place")


@pytest.mark.parametrize("names", [None, [f"class {number}" for number in range(12)]])
def test_numbered_folders_are_labels(tmp_path, names):
    folder = write_class_folders(tmp_path / "n", [str(n) for n in range(12)], per_class=1)
    items = load_images(str(folder), classnames=names)
    assert [item["label"] for item in items] == list(range(12))
    assert items.classnames == (names or [str(n) for n in range(12)])
    assert contents(items)[2][0] == picture(200).tobytes()


def test_split_folders(tmp_path):
    for seed, split in enumerate(("train", "test")):
        write_class_folders(tmp_path / split, seed=seed)
    assert contents(load_images(str(tmp_path), split="test")) == contents(
        load_images(str(tmp_path / "test"))
    )
    with pytest.raises(ValueError, match="has splits: set split to test or train"):
        load_images(str(tmp_path))
    with pytest.raises(ValueError, match=r"no folder for split 'tset' \(nearest: 'test'\)"):
        load_images(str(tmp_path), split="tset")


def test_pictures_are_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    picture(0, (20, 10)).save(tmp_path / "sideways.png", exif=exif)
    assert load_images(str(tmp_path))[0]["image"].size == (10, 20)


def test_damaged_file_is_named(shapes):
    whole = (shapes / "square" / "01.png").read_bytes()
    (shapes / "square" / "01.png").write_bytes(whole[: len(whole) // 2])
    items = load_images(str(shapes))
    with pytest.raises(
        CalibrationError, match=r"item 5: image file .*square/01\.png cannot be read"
    ):
        items[5]


def test_missing_file_is_named_with_where_it_was_looked_for(shapes):
    table = write_table(shapes, ".jsonl")
    (shapes / "circle" / "00.png").unlink()
    (shapes / "star" / "01.png").unlink()
    expected = r"2 of 12 image files do not exist; .*item 0, .*circle/00\.png \(relative paths"
    with pytest.raises(CalibrationError, match=expected):
        load_images(table, image_column="file", label_column="kind")


def as_bytes(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "form",
    [
        lambda image: image,
        as_bytes,
        lambda image: {"bytes": as_bytes(image), "path": "inside.png"},
        np.asarray,
        lambda image: torch.from_numpy(np.array(image)),
    ],
)
def test_forms_of_one_picture(form):
    assert to_rgb(form(picture(3)), "here").tobytes() == picture(3).tobytes()


@pytest.mark.parametrize(
    "rows",
    [
        [{"image": picture(0), "label": 1}, {"image": picture(1), "label": 0}],
        [(picture(0), 1), (picture(1), 0)],
        [(picture(0), torch.tensor(1)), (picture(1), np.int64(0))],
    ],
)
def test_any_map_style_data_set(rows):
    items = ImageItems(rows, name="here", classnames=["a", "b"])
    assert contents(items) == [(picture(0).tobytes(), 1), (picture(1).tobytes(), 0)]


def test_a_view_of_a_view_renumbers_labels(shapes):
    inner = load_images(str(shapes))
    outer = ImageItems(inner, name="here", classnames=["square", "star", "circle"])
    assert [outer[index]["label"] for index in (0, 4, 8)] == [2, 0, 1]


def test_items_without_labels(shapes):
    bare = ImageItems([picture(0)], name="here")
    folder = load_images(str(shapes / "star"))
    assert (len(folder), folder.has_labels) == (4, False)
    for items in (bare, folder, load_images(str(shapes), label_column=None)):
        assert set(items[0]) == {"image"}


@pytest.mark.parametrize("path", ["./no/such", "no/such/folder", "missing.csv", "/no_such"])
def test_missing_path(path):
    with pytest.raises(ValueError, match=f"data '{path}' does not exist"):
        load_images(path)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("table.csv", {"split": "test"}, r"one table without splits: remove split \('test'\)"),
        ("table.csv", {"image_column": "fil"}, r"no image_column 'fil' \(nearest: 'file'\)"),
        ("table.xlsx", {}, r"tables end in .*got '\.xlsx'"),
        ("broken.jsonl", {}, r"broken\.jsonl' is not readable as json"),
        ("seven.jsonl", {"classnames": SHAPES}, r"item 1: label 7 is out of range \(0\.\.2"),
        ("numbers.csv", {}, "item 0: not an image but int"),
        ("hidden", {}, "has no images"),
        (".", {}, r"00\.png.*beside class folders \(circle or"),
    ],
)
def test_what_cannot_be_read_as_images_is_refused(shapes, path, options, message):
    if path == ".":
        (shapes / "circle" / "00.png").rename(shapes / "00.png")
    elif path == "table.csv":
        write_table(shapes, ".csv")
    (shapes / "table.xlsx").touch()
    (shapes / "broken.jsonl").write_text('{"image": ')
    rows = [{"image": "circle/00.png", "label": label} for label in (0, 7)]
    (shapes / "seven.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (shapes / "numbers.csv").write_text("image,label\n1,0\n")
    (shapes / "hidden").mkdir()
    with pytest.raises((ValueError, CalibrationError), match=message):
        load_images(str(shapes / path), **options)[0]


def test_hub_id_needs_a_split_and_offline_names_the_setting():
    with pytest.raises(ValueError, match=r"'pictures' .*: give a path .* hub dataset, set split"):
        load_images("pictures")
    message = r"'somebody/pictures', split 'test'.*HF_HUB_OFFLINE"
    with pytest.raises(CalibrationError, match=message):
        load_images("somebody/pictures", split="test")


def test_misspelt_path_is_to_be_corrected_before_a_split_is_set(shapes, monkeypatch):
    monkeypatch.chdir(shapes.parent)
    message = r"'shapes/trian' is neither.*: correct the path, or, if .* split .*train or test\)$"
    with pytest.raises(ValueError, match=message):
        load_images("shapes/trian")


def test_data_sets_that_are_no_numbered_items_with_images_are_refused(shapes):
    stream = datasets.Dataset.from_list(rows_of(shapes)).to_iterable_dataset()
    with pytest.raises(CalibrationError, match=r"IterableDataset\. Load it without streaming"):
        ImageItems(stream, name="here")
    items = ImageItems([{"img": picture(0)}], name="here")
    with pytest.raises(CalibrationError, match=r"has no .image.; it has: img\. Check image_column"):
        items[0]
