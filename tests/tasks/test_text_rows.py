"""Public datasets as texts: GLUE reads as FusionBench's loader gives it."""

from typing import Any

import datasets
import pytest
import torch
from sample_pools import text_batch
from tiny_texts import word_tokenizer

from fusion_bench_featcal.tasks import load_chats, load_glue

TABLES: dict[str, dict[str, list[Any]]] = {
    "mnli": {"premise": ["a b", "c"], "hypothesis": ["d", "e"], "label": [2, 0]},
    "stsb": {"sentence1": ["a b", "c"], "sentence2": ["d", "e f"], "label": [2.6, 4.0]},
}


def load_tables(path: str, name: str | None = None, split: str | None = None) -> Any:
    """As `datasets.load_dataset`, from a hub with two of GLUE's tables of two rows."""
    table = datasets.Dataset.from_dict({**TABLES[str(name)], "idx": [0, 1]})
    return datasets.DatasetDict({"train": table}) if split is None else table


@pytest.mark.parametrize("name", TABLES)
def test_glue_is_fusion_benchs(name, monkeypatch):
    from fusion_bench.tasks.flan_t5_text_generation import glue_load_dataset

    monkeypatch.setattr(datasets, "load_dataset", load_tables)
    monkeypatch.setattr(glue_load_dataset, "load_dataset", load_tables)
    rows: Any = load_glue(name, "train")
    ours = list(rows)
    split: Any = word_tokenizer().backend_tokenizer.pre_tokenizer
    texts = " ".join(text for row in ours for text in row.values())
    words = ("<pad>", "</s>", "<unk>", *sorted({word for word, _ in split.pre_tokenize_str(texts)}))
    tokenizer = word_tokenizer(ends=True, words=words, model_max_length=64)
    expected: Any = glue_load_dataset.load_glue_dataset(
        name, tokenizer, cache_dir=None, split="train"
    )
    assert len(ours) == len(expected) == 2 and all(row["target"] for row in ours)
    for rows in zip(ours, expected, strict=True):
        our, their = (text_batch([row], "seq2seq", tokenizer) for row in rows)
        assert all(torch.equal(our[key], their[key]) for key in our)


def test_chats_and_questions(monkeypatch):
    turns = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    rows = datasets.Dataset.from_list([{"messages": turns, "problem": "c", "solution": "d"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    for columns in ({}, {"prompt": "problem", "answer": "solution"}):
        chats: Any = load_chats("x", "train", **columns)
        assert list(chats) == [{"messages": turns}]
    with pytest.raises(ValueError, match=r"no columns \['answer'\].*'problem', 'solution'"):
        load_chats("x", "train", prompt="problem", answer="answer")
