"""Public datasets as texts: GLUE with FusionBench's prompts, and questions as chats."""

from typing import Any

import datasets
import pytest

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.tasks import load_chats, load_glue

TURNS = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
STSB = (
    "Consider the sentences 'a b' and 'd'. On a scale from 1 (completely different) to 5 "
    "(completely similar), rate the similarity."
)


def test_glue_has_fusion_benchs_prompts_and_answers(monkeypatch):
    row = {"sentence1": "a b", "sentence2": "d", "idx": 0}
    rows = datasets.Dataset.from_list([row | {"label": label} for label in (2.6, -1.0)])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    texts: Any = load_glue("stsb", "train")
    targets = "2.6", ""  # a withheld label is -1
    assert list(texts) == [{"prompt": STSB, "target": target} for target in targets]


def test_chats_and_questions(monkeypatch):
    rows = datasets.Dataset.from_list([{"messages": TURNS, "problem": "c", "solution": "d"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    for columns in ({}, {"prompt": "problem", "answer": "solution"}):
        chats: Any = load_chats("x", "train", **columns)
        assert list(chats) == [{"messages": TURNS}]
    with pytest.raises(ValueError, match=r"no columns \['answer'\].*'problem', 'solution'"):
        load_chats("x", "train", prompt="problem", answer="answer")


def test_failures_of_the_hub_name_the_data(monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    for load in (lambda: load_chats("org/chats", "test"), lambda: load_glue("cola", "test")):
        with pytest.raises(CalibrationError, match=r"^data '(org/chats|nyu-mll/glue:cola)', split"):
            load()
