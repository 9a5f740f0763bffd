"""`featcal calibrate` reads labels of images and texts as the experts' heads number them."""

import contextlib
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from made_folders import ROWS, words, write_models, write_rows
from reports import featcal
from tiny_images import channels_first, picture, write_class_folders
from tiny_models import add_up, scatter
from tiny_texts import TASKS, WORDS, sentences, word_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from fusion_bench_featcal.data.tables import FileRows
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.folders.images import ZeroShot, open_image_task
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import Part
from fusion_bench_featcal.folders.texts import head_labels
from fusion_bench_featcal.results import read_run

PETS, UNNAMED = ["cat", "dog", "owl"], ["LABEL_0", "LABEL_1", "LABEL_2"]


def write(folder: Path, kind: str, labels: list[Any], names: Any = ()) -> str:
    """Images with labels: folders, or a table, with class names of its own if it has them."""
    if kind == "folders":
        return str(write_class_folders(folder, labels, per_class=1))
    for number in range(len(labels)):
        picture(number).save(folder / f"{number}.png")
    images = [f"{number}.png" for number in range(len(labels))]
    table = datasets.Dataset.from_dict({"image": images, "label": labels})
    if kind == "numbered":
        table = table.cast_column("label", datasets.ClassLabel(names=list(names)))
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
        ("numbers", [3, 0], [], PETS, "label 3 is none of the 3 classes"),
        ("numbered", [0, 1], ["cat", "cow"], PETS, "label 'cow' is none of the 3 classes"),
        ("folders", ["cat", "cow"], [], PETS, "label 'cow' is none of the 3 classes"),
        ("numbers", [1], [], ZeroShot.__new__(ZeroShot), "zero-shot heads need class names"),
    ],
)  # fmt: skip
def test_of_images(tmp_path, kind, labels, names, heads, expected):
    path = write(tmp_path, kind, labels, names)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"--eval a=.*: .*{expected}"):
            opened(path, heads)
        return
    batches = opened(path, heads).tests.batches(None)
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == expected


def test_images_without_labels_and_damaged_ones_are_named(tmp_path):
    path = write(tmp_path, "numbers", [-1])
    assert opened(path, None).samples == 1  # labels are not read
    Path(path).unlink()
    with pytest.raises(ValueError, match=r"--eval a=.* cannot be evaluated: put them into"):
        opened(str(tmp_path), PETS)
    (tmp_path / "0.png").write_bytes(b"")
    with pytest.raises(CalibrationError, match=r"item 0: file .*0\.png cannot be read"):
        list(opened(str(tmp_path), None).batches)


ANSWERS, CLASSES = ("no", "maybe", "yes"), ["yes", "no", "maybe"]


def class_labels(numbers: list[int]) -> datasets.Dataset:
    features = datasets.Features({"label": datasets.ClassLabel(names=CLASSES)})
    return datasets.Dataset.from_dict({"label": numbers}, features)


def texts(*labels: Any) -> FileRows:
    return FileRows((f"line {n}", {"label": label}) for n, label in enumerate(labels))


@pytest.mark.parametrize(
    ("rows", "classes", "numbers"),
    [
        (class_labels([0, 1, 2, 0]), ANSWERS, [2, 0, 1, 2]),
        (class_labels([0, 1, 2, 0]), UNNAMED, [0, 1, 2, 0]),
        (texts("yes", "No", "MAYBE"), ANSWERS, [2, 0, 1]),
        (texts("yes", "no", "maybe"), UNNAMED, [2, 1, 0]),  # in alphabetical order
        (texts("2", "0"), ANSWERS, [2, 0]),  # of a CSV file
        (texts(2, 0.0), ANSWERS, [2, 0]),
    ],
)
def test_of_texts(rows: Any, classes: Any, numbers: list[int]):
    part = Part("--data a=x", TextRows(rows, "--data a=x"), [*range(len(rows))])
    assert head_labels(part, classes) == numbers


def llama_classifier(seed: int) -> Any:
    """A decoder with a head, which finds a text's last token by the padding token."""
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, id2label=dict(enumerate(ANSWERS)),
        label2id={name: number for number, name in enumerate(ANSWERS)},
    )  # fmt: skip
    torch.manual_seed(0)
    return scatter(LlamaForSequenceClassification(config), seed, 0.1).eval()


def test_a_classifier_without_padding_token_and_labels_in_another_order(tmp_path: Path):
    """Labels are the expert's own choices, which it is therefore right about."""
    base, tokenizer = llama_classifier(0), word_tokenizer(model_max_length=32)
    experts = {task: llama_classifier(n) for n, task in enumerate(TASKS, start=1)}
    for task, expert in experts.items():
        prompts = [row["prompt"] for row in sentences(task, ROWS)]
        ids = [torch.tensor([tokenizer(prompt)["input_ids"]]) for prompt in prompts]
        names = [ANSWERS[int(expert(one).logits.argmax())] for one in ids]
        rows = [{"text": t, "label": n, "id": t} for t, n in zip(prompts, names, strict=True)]
        write_rows(tmp_path / f"{task}.jsonl", rows)
        table = class_labels([CLASSES.index(name) for name in names])
        table.add_column("text", prompts).to_parquet(tmp_path / f"{task}.parquet")  # type: ignore[call-arg]
    write_models(tmp_path, base, tokenizer, experts, add_up(base, experts, 0.4))
    with contextlib.chdir(tmp_path):
        done = featcal(*words(tmp_path, data=("one.jsonl", "two.parquet")))
    assert done.code == 0, done.err
    assert "one: columns that are not read: id" in done.out
    accuracy = read_run(tmp_path / "out" / "featcal").accuracy["experts"]
    assert accuracy["one"] == accuracy["two"] == 1
