"""Public datasets as texts: GLUE reads as FusionBench's own loader gives it."""

from typing import Any

import datasets
import pytest
from tiny_texts import word_tokenizer

from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.tasks.text_rows import load_chats, load_glue

PAIR = {"sentence1": ["a b", "c"], "sentence2": ["d", "e f"]}
TABLES: dict[str, dict[str, list[Any]]] = {
    "cola": {"sentence": ["a b", "c"], "label": [0, 1]},
    "mnli": {"premise": ["a b", "c"], "hypothesis": ["d", "e"], "label": [2, 0]},
    "mrpc": {**PAIR, "label": [1, 0]},
    "qnli": {"question": ["a b", "c"], "sentence": ["d", "e"], "label": [0, 1]},
    "qqp": {"question1": ["a b", "c"], "question2": ["d", "e"], "label": [1, 0]},
    "rte": {**PAIR, "label": [0, 1]},
    "sst2": {"sentence": ["a b", "c"], "label": [1, 0]},
    "stsb": {**PAIR, "label": [2.6, 4.0]},
}


@pytest.fixture
def hub(monkeypatch):
    """A hub with GLUE's tables, of two rows each."""

    def load_dataset(path: str, name: str | None = None, split: str | None = None) -> Any:
        rows = {**TABLES[str(name)], "idx": [0, 1]}
        table = datasets.Dataset.from_dict(rows)
        return datasets.DatasetDict({"train": table}) if split is None else table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return load_dataset


def words_of(rows: Any) -> list[str]:
    split: Any = word_tokenizer().backend_tokenizer.pre_tokenizer
    texts = [text for row in rows for text in row.values()]
    return sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)})


@pytest.mark.parametrize("name", TABLES)
def test_glue_is_fusion_benchs(name, hub, monkeypatch):
    from fusion_bench.tasks.flan_t5_text_generation import glue_load_dataset

    monkeypatch.setattr(glue_load_dataset, "load_dataset", hub)
    words = ("<pad>", "</s>", "<unk>", *words_of(load_glue(name, "train")))
    tokenizer = word_tokenizer(ends=True, words=words, model_max_length=64)
    theirs = glue_load_dataset.load_glue_dataset(name, tokenizer, cache_dir=None, split="train")
    encoder = TextEncoder(tokenizer, "seq2seq")
    ours: Any = load_glue(name, "train")
    assert len(ours) == len(theirs) == 2
    rows: Any = theirs
    for our, their in zip(ours, rows, strict=True):
        assert encoder.sample(our, "x") == encoder.sample(their, "x")
        assert our["target"]


def test_withheld_labels_are_empty_targets(hub, monkeypatch):
    monkeypatch.setitem(TABLES["sst2"], "label", [-1, 0])
    assert load_glue("sst2", "test")[0]["target"] == ""


def test_unknown_glue_task():
    with pytest.raises(ValueError, match=r"no task 'wnli'; it has cola, "):
        load_glue("wnli", "train")


def test_chats_and_questions(monkeypatch):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = datasets.Dataset.from_list([{"messages": turns, "problem": "c", "solution": "d"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    assert load_chats("x", "train")[0] == {"messages": turns}
    asked = load_chats("x", "train", prompt="problem", answer="solution")[0]["messages"]
    assert [(turn["role"], turn["content"]) for turn in asked] == [
        ("user", "c"),
        ("assistant", "d"),
    ]
    with pytest.raises(ValueError, match="give both or neither"):
        load_chats("x", "train", prompt="problem")
    with pytest.raises(ValueError, match=r"no columns \['answer'\].*'problem', 'solution'"):
        load_chats("x", "train", prompt="problem", answer="answer")
