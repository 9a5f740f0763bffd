"""Text tasks of `featcal calibrate`: labels of heads, and classifiers without a padding token."""

import contextlib
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from made_folders import ROWS, words, write_models, write_rows
from reports import featcal
from tiny_models import add_up, scatter
from tiny_texts import TASKS, WORDS, sentences, word_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from fusion_bench_featcal.data.tables import FileRows
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.folders.tasks import Part
from fusion_bench_featcal.folders.texts import head_labels
from fusion_bench_featcal.results import read_run

NAMED, UNNAMED = ("no", "maybe", "yes"), ("LABEL_0", "LABEL_1", "LABEL_2")
CLASSES = ["yes", "no", "maybe"]


def class_labels(numbers: list[int]) -> datasets.Dataset:
    features = datasets.Features({"label": datasets.ClassLabel(names=CLASSES)})
    return datasets.Dataset.from_dict({"label": numbers}, features)


def texts(*labels: Any) -> FileRows:
    return FileRows((f"line {n}", {"label": label}) for n, label in enumerate(labels))


@pytest.mark.parametrize(
    ("rows", "classes", "numbers"),
    [
        (class_labels([0, 1, 2, 0]), NAMED, [2, 0, 1, 2]),
        (class_labels([0, 1, 2, 0]), UNNAMED, [0, 1, 2, 0]),
        (class_labels([0, 0]), NAMED, [2, 2]),
        (texts("yes", "No", "MAYBE"), NAMED, [2, 0, 1]),
        (texts("yes", "no", "maybe"), UNNAMED, [2, 1, 0]),  # in alphabetical order
        (texts("2", "0"), NAMED, [2, 0]),  # of a CSV file
        (texts(2, 0.0), NAMED, [2, 0]),
    ],
)
def test_labels_are_the_heads_numbers(rows: Any, classes: tuple[str, ...], numbers: list[int]):
    part = Part("--data a=x", TextRows(rows, "--data a=x"), [*range(len(rows))])
    assert head_labels(part, classes) == numbers


def test_class_names_that_a_head_does_not_have_are_refused():
    part = Part("--data a=x", TextRows(class_labels([0, 1, 2]), "--data a=x"), [0, 1, 2])
    with pytest.raises(
        ValueError, match="--data a=x, item 0: label 'yes' is none of the 3 classes"
    ):
        head_labels(part, ("negative", "neutral", "positive"))


def llama_classifier(seed: int) -> Any:
    """A decoder with a head, which finds a text's last token by the padding token."""
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, id2label=dict(enumerate(NAMED)),
        label2id={name: number for number, name in enumerate(NAMED)},
    )  # fmt: skip
    torch.manual_seed(0)
    return scatter(LlamaForSequenceClassification(config), seed, 0.1).eval()


def test_a_classifier_without_padding_token_and_labels_in_another_order(tmp_path: Path):
    base, tokenizer = llama_classifier(0), word_tokenizer(model_max_length=32)
    experts = {task: llama_classifier(n) for n, task in enumerate(TASKS, start=1)}
    for task, expert in experts.items():  # labels are the expert's own choices
        prompts = [row["prompt"] for row in sentences(task, ROWS)]
        ids = [torch.tensor([tokenizer(prompt)["input_ids"]]) for prompt in prompts]
        numbers = [int(expert(one).logits.argmax()) for one in ids]
        names = [NAMED[number] for number in numbers]
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
