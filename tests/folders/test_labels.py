"""`featcal calibrate` reads labels of images and texts as the experts' heads number them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from tiny_images import channels_first, picture, write_class_folders
from tiny_texts import word_tokenizer

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.tables import FileRows
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.folders.images import open_image_task
from fusion_bench_featcal.folders.model_folder import class_names
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import Part
from fusion_bench_featcal.folders.texts import head_labels, open_class_task

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


def opened(path: str, heads: Any) -> Any:
    request = Request(merged="m", expert={"a": "x"}, data={"a": path}, eval={"a": path}, out="o")
    return open_image_task("a", request, channels_first, heads)


@pytest.mark.parametrize(
    ("labels", "names", "heads", "expected"),
    [
        (["Dog", "owl"], [], PETS, [1, 2]),
        (["b", "c", "d"], [], UNNAMED, [0, 1, 2]),
        ([2, 0], [], PETS, [2, 0]),
        ([0, 1, 2], ["owl", "dog", "cat"], PETS, [2, 1, 0]),
        ([1, 0], ["b", "a", "c"], UNNAMED, [1, 0]),
        (["cat", "cow"], [], PETS, "label 'cow' is none of the 3 classes of the expert"),
    ],
)
def test_of_images(tmp_path, labels, names, heads, expected):
    path = write(tmp_path, labels, names)
    if isinstance(expected, str):
        with pytest.raises(CalibrationError, match=f"--eval a=.*: .*{expected}"):
            opened(path, heads)
        return
    batches = opened(path, heads).tests.batches(None)
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == expected


def test_data_to_evaluate_on_without_rows_are_refused(tmp_path: Path) -> None:
    table = datasets.Dataset.from_parquet(write(tmp_path, [0, 1, 2], []))
    table.select([]).to_parquet(tmp_path / "empty.parquet")  # type: ignore[union-attr]
    paths: Any = {"data": {"a": f"{tmp_path}/table.parquet"}}
    request = Request(
        merged="m", expert={"a": "x"}, **paths, eval={"a": f"{tmp_path}/empty.parquet"}, out="o"
    )
    with pytest.raises(ValueError, match=r"^--eval a=.*empty\.parquet has no rows"):
        open_image_task("a", request, channels_first, PETS)


def part_of(rows: Any) -> Part:
    return Part("--data a=x", TextRows(rows, "--data a=x"), [*range(len(rows))])


def texts(*labels: Any) -> FileRows:
    return FileRows((f"line {n}", {"label": label}) for n, label in enumerate(labels))


@pytest.mark.parametrize(
    ("rows", "classes", "numbers"),
    [
        (class_labels([0, 1, 2, 0], ["owl", "cat", "dog"]), PETS, [2, 0, 1, 2]),
        (class_labels([0, 1, 2, 0], ["owl", "cat", "dog"]), UNNAMED, [0, 1, 2, 0]),
        (texts("owl", "Cat", "DOG"), PETS, [2, 0, 1]),
        (texts("owl", "cat", "dog"), UNNAMED, [2, 0, 1]),  # in alphabetical order
        (texts("2", "0"), PETS, [2, 0]),  # of a CSV file
        (texts(1, 4.0, "5"), ["1", "2", "3", "4", "5"], [0, 3, 4]),  # names that are numbers
        (texts("us", "US"), ["US", "us"], [1, 0]),
        (texts(True, False), ["true", "false"], [0, 1]),
        (texts(True, False), ["no", "yes"], [1, 0]),
        (texts("3 stars", "1 Star"), STARS, [2, 0]),
    ],
)
def test_of_texts(rows: Any, classes: Any, numbers: list[int]):
    assert head_labels(part_of(rows), classes)[0] == numbers


@pytest.mark.parametrize("label", [1, "0", 3.0])
def test_numbers_are_not_read_out_of_names(label: Any):
    rows = texts("1 star", label)
    with pytest.raises(CalibrationError) as refused:
        head_labels(part_of(rows), STARS)
    assert str(refused.value) == (
        f"--data a=x, line 1: label {label!r} is none of the 3 classes of the expert's head: "
        "1 star, 2 stars, 3 stars. Write labels as names of classes, which have numbers inside"
    )


@pytest.mark.parametrize(
    ("rows", "classes", "note"),
    [
        (texts("owl", "cat", "dog"), UNNAMED, "its expert's head has no names of classes, so they "
         "are cat, dog, owl in this order"),
        (texts(1, 2), PETS, "no label is 0, and labels count from 0: 1 is 'dog'"),
        (texts(0, 2), PETS, ""),
        (texts("dog", "owl"), PETS, ""),
        (texts(1, 2), ["0", "1", "2"], ""),
    ],
)  # fmt: skip
def test_notes_on_labels(rows: Any, classes: Any, note: str):
    assert head_labels(part_of(rows), classes)[1] == note


@pytest.mark.parametrize(
    ("id2label", "numbers", "expected"),
    [
        (UNNAMED, {"owl": 2, "cat": 0, "dog": 1}, PETS),
        (UNNAMED, {"owl": 5, "cat": 0, "dog": 1}, UNNAMED),
        (PETS, {"LABEL_0": 0}, PETS),
        (PETS, {"cat": 1, "dog": 0, "owl": 2}, "'cat' is class 0 by id2label and 1 by label2id"),
    ],
)
def test_names_of_a_head(id2label, numbers, expected):
    empty = SimpleNamespace(config=SimpleNamespace(id2label=dict(enumerate(id2label))))
    config = {"label2id": numbers}
    model: Any = SimpleNamespace(label="--expert one=DIR", empty=empty, config=config)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"--expert one=.*: in its config.json {expected}"):
            class_names(model)
    else:
        assert class_names(model) == expected


LISTS, ONE = [[1.0, 0.0], [0.0, 1.0]] * 5, [0.1, 0.8] * 5


@pytest.mark.parametrize(
    ("labels", "heads", "reason"),
    [
        (LISTS, PETS, "its labels are lists, not one class each"),
        (ONE, ["LABEL_0"], "its expert's head has one output"),
        ([None] * 10, PETS, r"its rows have no label \(--columns a:label=COLUMN"),
    ],
)
def test_labels_that_name_no_class_are_not_scored(tmp_path, labels, heads, reason):
    rows = [json.dumps({"text": f"a cat {n}", "label": label}) for n, label in enumerate(labels)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    data = {"a": str(tmp_path / "a.jsonl")}
    request = Request(merged="m", expert={"a": "x"}, data=data, out="o")
    encoder = TextEncoder(word_tokenizer(), "classification")
    task = open_class_task("a", request, encoder, heads, pads=True)
    assert task.tests is None and task.samples == 10
    assert re.search(f"a: not scored, as {reason}", "; ".join(task.notes))


def test_images_of_a_head_with_one_output_are_not_scored(tmp_path):
    task = opened(write(tmp_path, [0, 0], []), ["LABEL_0"])
    assert task.tests is None
    assert task.notes[-1].startswith("a: not scored, as its expert's head has one output")
