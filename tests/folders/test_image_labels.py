"""`featcal calibrate` reads labels of images as the heads of their experts number them."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tiny_images import channels_first, picture, write_class_folders

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.folders.images import ZeroShot, open_image_task
from fusion_bench_featcal.folders.request import Request

PETS, UNNAMED = ["cat", "dog", "owl"], ["LABEL_0", "LABEL_1", "LABEL_2"]


def write(folder: Path, kind: str, labels: list[Any], names: list[str]) -> str:
    """Images with labels: folders, or a table, with class names of its own if it has them."""
    if kind == "folders":
        return str(write_class_folders(folder, labels, per_class=1))
    for number in range(len(labels)):
        picture(number).save(folder / f"{number}.png")
    table = datasets.Dataset.from_dict(
        {"image": [f"{number}.png" for number in range(len(labels))], "label": labels}
    )
    if kind == "numbered":
        table = table.cast_column("label", datasets.ClassLabel(names=names))
    table.to_parquet(folder / "table.parquet")
    return str(folder / "table.parquet")


def opened(path: str, heads: Any) -> Any:
    request = Request(merged="m", expert={"a": "x"}, data={"a": path}, eval={"a": path}, out="o")
    return open_image_task("a", request, channels_first, heads)


@pytest.mark.parametrize(
    ("kind", "labels", "names", "heads", "expected"),
    [
        ("folders", ["cat", "owl"], [], PETS, [0, 2]),
        ("folders", ["Dog", "owl"], [], PETS, [1, 2]),
        ("folders", ["00", "01", "02"], [], PETS, [0, 1, 2]),
        ("folders", ["000", "002"], [], UNNAMED, [0, 2]),
        ("folders", ["b", "c", "d"], [], UNNAMED, [0, 1, 2]),
        ("texts", ["owl", "cat"], [], PETS, [2, 0]),
        ("texts", ["b", "a", "c"], [], UNNAMED, [1, 0, 2]),
        ("texts", ["02", "00"], [], PETS, [2, 0]),
        ("numbers", [2, 0], [], PETS, [2, 0]),
        ("numbers", [1, 0], [], UNNAMED, [1, 0]),
        ("numbered", [0, 1, 2], ["owl", "dog", "cat"], PETS, [2, 1, 0]),
        ("numbered", [1, 0], ["b", "a", "c"], UNNAMED, [1, 0]),
        ("numbers", [3, 0], [], PETS, "--eval a=.*: label 3 is none of the 3 classes"),
        ("numbered", [0, 1], ["cat", "cow"], PETS, "--eval a=.*: label 'cow' is none of the 3"),
        ("folders", ["cat", "cow"], [], PETS, "--eval a=.*: label 'cow' is none of the 3 classes"),
    ],
)  # fmt: skip
def test_labels_are_the_heads_numbers(tmp_path, kind, labels, names, heads, expected):
    path = write(tmp_path, kind, labels, names)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            opened(path, heads)
        return
    batches = opened(path, heads).tests.batches(None)
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == expected


def test_images_without_labels_and_damaged_ones_are_named(tmp_path):
    path = write(tmp_path, "numbers", [-1], [])
    assert opened(path, None).samples == 1  # labels are not read
    path = write(tmp_path, "numbers", [1], [])
    with pytest.raises(ValueError, match=r"--eval a=.*zero-shot heads need class names"):
        opened(path, ZeroShot.__new__(ZeroShot))
    Path(path).unlink()
    with pytest.raises(ValueError, match=r"--eval a=.* cannot be evaluated: put them into"):
        opened(str(tmp_path), PETS)
    (tmp_path / "0.png").write_bytes(b"")
    with pytest.raises(CalibrationError, match=r"item 0: file .*0\.png cannot be read"):
        list(opened(str(tmp_path), None).batches)
