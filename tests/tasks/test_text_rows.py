"""Public datasets as texts: GLUE with FusionBench's prompts, and questions as chats."""

from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.models import hub
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
    with pytest.raises(ValueError, match=r"\['answer'\] not in .*'problem', 'solution'"):
        load_chats("x", "train", prompt="problem", answer="answer")


@pytest.mark.parametrize("load", [load_glue, load_chats])
def test_a_busy_hub_is_asked_again_and_the_commit_is_recorded(load, monkeypatch):
    statuses, commit = iter((429, 503, 200, 404)), "0" * 40
    columns: Any = {"sentence": ["a"], "label": [1], "messages": [TURNS]}
    rows = datasets.Dataset.from_dict(columns)
    file = {"filename": f"cache/some___data/default/0.0.0/{commit}/data-train.arrow"}

    def load_dataset(*_: Any, **__: Any) -> Any:
        error: Any = OSError("no")  # as of the hub's client
        error.response = SimpleNamespace(status_code=next(statuses))
        if error.response.status_code == 200:
            return rows
        raise error

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(hub, "_DATA_SETS", {})
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.Dataset, "cache_files", [file])
    assert len(load("sst2", "train")) == 1
    assert hub.commits()["datasets/some/data"] == commit
    with pytest.raises(CalibrationError, match=r"sst2', split 'train': .*nothing of that name on "):
        load("sst2", "train")
