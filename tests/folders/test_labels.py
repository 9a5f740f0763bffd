"""`featcal calibrate` reads labels of images and texts as the experts' heads number them."""

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from made_folders import change_json, words, write_rows
from reports import error_of, featcal
from tiny_images import channels_first, picture, write_class_folders
from tiny_texts import word_tokenizer

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.labels import encode_labels
from fusion_bench_featcal.data.text_samples import ClassifierTextEncoder
from fusion_bench_featcal.folders.images import open_image_task
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import head_class_indices
from fusion_bench_featcal.folders.text_classes import open_class_task

PETS, UNNAMED = ["cat", "dog", "owl"], ["LABEL_0", "LABEL_1", "LABEL_2"]
STARS = ["1 star", "2 stars", "3 stars"]


def class_labels(numbers: list[int], names: list[str]) -> datasets.Dataset:
    features = datasets.Features({"label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({"label": numbers}, features)


def write(folder: Path, labels: list[Any], names: list[str]) -> str:
    """Images with labels: folders of classes, or a table if there are class names or numbers."""
    if isinstance(labels[0], str):
        return str(write_class_folders(folder, labels, per_class=1))
    for number in range(len(labels)):
        picture(number).save(folder / f"{number}.png")
    table = class_labels(labels, names) if names else datasets.Dataset.from_dict({"label": labels})
    images: Any = [f"{number}.png" for number in range(len(labels))]
    table.add_column("image", images).to_parquet(folder / "table.parquet")  # type: ignore[call-arg]
    return str(folder / "table.parquet")


def request(path: Any, test: Any = None) -> Request:
    return Request(expert={"a": "x"}, data={"a": f"{path}"}, eval={"a": f"{test or path}"})


def opened(path: str, heads: Any) -> Any:
    return open_image_task("a", request(path), channels_first, heads)


def numbers_of(task: Any) -> list[int]:
    return torch.cat([batch["labels"] for batch in task.scorer.batches(None)]).tolist()


@pytest.mark.parametrize(("labels", "names", "heads", "expected"), [
    (["Dog", "owl"], [], PETS, [1, 2]),
    (["b", "c", "d"], [], UNNAMED, [0, 1, 2]),
    ([2, 0], [], PETS, [2, 0]),
    ([0, 1, 2], ["owl", "dog", "cat"], PETS, [2, 1, 0]),
    ([1, 0], ["b", "a", "c"], UNNAMED, [1, 0]),
    (["cat", "cow"], [], PETS, "label 'cow' is not one of the 3 classes of the expert"),
])  # fmt: skip
def test_of_images(tmp_path, labels, names, heads, expected):
    path = write(tmp_path, labels, names)
    if isinstance(expected, str):
        with pytest.raises(CalibrationError, match=f"--eval a=.*: .*{expected}"):
            opened(path, heads)
        return
    assert numbers_of(opened(path, heads)) == expected


def test_data_to_evaluate_on_without_rows_are_refused(tmp_path: Path) -> None:
    table = datasets.Dataset.from_parquet(write(tmp_path, [0, 1, 2], []))
    table.select([]).to_parquet(tmp_path / "empty.parquet")  # type: ignore[union-attr]
    asked = request(tmp_path / "table.parquet", tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match=r"^--eval a=.*empty\.parquet has no examples"):
        open_image_task("a", asked, channels_first, PETS)


def opened_texts(folder: Path, labels: Any, heads: Any) -> Any:
    """The task of equal texts with labels: a table with class names, or lines of JSON."""
    file, encoder = folder / "a.parquet", ClassifierTextEncoder(word_tokenizer())
    if isinstance(labels, datasets.Dataset):
        labels.add_column("text", ["a b"] * len(labels)).to_parquet(file)  # type: ignore[call-arg]
    else:
        rows = ({"text": "a b", "label": label} for label in labels)
        file = write_rows(folder / "a.jsonl", rows)
    return open_class_task("a", request(file), encoder, heads, pads=True)


@pytest.mark.parametrize(
    ("labels", "classes", "numbers"),
    [
        (class_labels([0, 1, 2, 0], ["owl", "cat", "dog"]), PETS, [2, 0, 1, 2]),
        (class_labels([0, 1, 2, 0], ["owl", "cat", "dog"]), UNNAMED, [0, 1, 2, 0]),
        (("owl", "Cat", "DOG"), PETS, [2, 0, 1]),
        (("owl", "cat", "dog"), UNNAMED, [2, 0, 1]),  # in alphabetical order
        (("2", "0"), PETS, [2, 0]),  # of a CSV file
        ((1, 4.0, "5"), ["1", "2", "3", "4", "5"], [0, 3, 4]),  # names that are numbers
        (("us", "US"), ["US", "us"], [1, 0]),
        ((True, False), ["true", "false"], [0, 1]),
        ((True, False), ["no", "yes"], [1, 0]),
        (("3 stars", "1 Star"), STARS, [2, 0]),
    ],
)
def test_of_texts(labels: Any, classes: Any, numbers: list[int], tmp_path: Path):
    assert numbers_of(opened_texts(tmp_path, labels, classes)) == numbers


@pytest.mark.parametrize("label", [1, "0", 3.0])
def test_numbers_are_not_read_out_of_names(label: Any, tmp_path: Path):
    with pytest.raises(CalibrationError) as refused:
        opened_texts(tmp_path, ("1 star", label), STARS)
    assert str(refused.value) == (
        f"--eval a={tmp_path}/a.jsonl, line 2: label {label!r} is not one of the 3 classes of the "
        "expert's head: 1 star, 2 stars, 3 stars. Class names contain numbers here: write each "
        "label as its name"
    )


@pytest.mark.parametrize(
    ("labels", "classes", "note"),
    [
        (("owl", "cat", "dog"), UNNAMED, "its expert's head has no class names, so they "
         "are cat, dog, owl in this order"),
        ((1, 2), PETS, "no label is 0, but classes are numbered from 0: 1 is 'dog'"),
        ((0, 2), PETS, ""),
        (("dog", "owl"), PETS, ""),
        ((1, 2), ["0", "1", "2"], ""),
    ],
)  # fmt: skip
def test_notes_on_labels(labels: Any, classes: Any, note: str, tmp_path: Path):
    notes = "; ".join(opened_texts(tmp_path, labels, classes).notes)
    assert note in notes and bool(note) == ("expert's head" in notes or "numbered from 0" in notes)


@pytest.mark.parametrize(("id2label", "label2id", "note"), [
    (["LABEL_0", "LABEL_1"], {"no": 0, "yes": 1}, ""),
    (["LABEL_0", "LABEL_1"], {"no": 5, "yes": 1}, "so they are no, yes in this order"),
    (["no", "yes"], {"LABEL_0": 0}, ""),
    (["no", "yes"], {"yes": 0, "no": 1}, "'no' is class 0 in id2label but 1 in label2id"),
])  # fmt: skip
def test_names_of_a_head(id2label: Any, label2id: Any, note: str, copied: Any):
    folder = copied("bert")
    named = {"id2label": dict(enumerate(id2label)), "label2id": label2id}
    change_json(folder / "one" / "config.json", named)
    if "is class" in note:
        line = error_of(*words(folder, "--plan"))
        assert line.startswith("--expert one=") and f": in its config.json, {note}" in line
        return
    done = featcal(*words(folder, "--plan"))
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert note in text and bool(note) == ("has no class names" in text)


LISTS, ONE = [[1.0, 0.0], [0.0, 1.0]] * 5, [0.1, 0.8] * 5


@pytest.mark.parametrize(("labels", "heads", "reason"), [
    (LISTS, PETS, "its labels are lists, not one class each"),
    (ONE, ["LABEL_0"], "its expert's head has one output"),
    ([None] * 10, PETS, r"its examples have no label \(give --columns a:label=COLUMN"),
])  # fmt: skip
def test_labels_that_name_no_class_are_not_scored(tmp_path, labels, heads, reason):
    rows = ({"text": f"a cat {n}", "label": label} for n, label in enumerate(labels))
    file = write_rows(tmp_path / "a.jsonl", rows)
    asked = Request(expert={"a": "x"}, data={"a": str(file)})
    encoder = ClassifierTextEncoder(word_tokenizer())
    task = open_class_task("a", asked, encoder, heads, pads=True)
    assert task.scorer is None and task.samples == 10
    assert re.search(f"a: not scored, because {reason}", "; ".join(task.notes))


def test_images_of_a_head_with_one_output_are_not_scored(tmp_path):
    task = opened(write(tmp_path, [0, 0], []), ["LABEL_0"])
    assert task.scorer is None
    assert task.notes[-1].startswith("a: not scored, because its expert's head has one output")


def test_a_number_beyond_own_names_with_digits_names_the_label_column() -> None:
    stars = ["1 star", "2 stars", "3 stars"]
    assert encode_labels([0, 2], None, stars, "data")[0] == [0, 2]
    with pytest.raises(
        CalibrationError, match=r"example 1: label 7 is not one of .*label_column'?$"
    ):
        encode_labels([0, 7], None, stars, "data")


def test_names_that_are_numbers_are_ordered_by_value() -> None:
    """A CSV file has texts: as texts, "10" would come before "2"."""
    labels, unnamed = [*map(str, range(12))], [f"LABEL_{number}" for number in range(12)]
    indices, _ = head_class_indices(labels, None, unnamed, str)
    assert indices == [*range(12)]
