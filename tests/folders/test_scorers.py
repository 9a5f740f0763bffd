"""`--evaluate`: a user's own function, and words that name nothing."""

from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fusion_bench_featcal.folders.options import scorer
from fusion_bench_featcal.folders.scorers import all_scores, comparison, scorers_of

OWN = """
def number(model, tokenizer):
    tokenizer.append("changed")
    return model.weight.numel()

def several(model, tokenizer):
    return {"first": 0.25, "second": 2}

def text(model, tokenizer):
    return "good"

def failing(model, tokenizer):
    return 1 / 0

"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_scores.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def scores_of(function: Any, processor: Any = None) -> Mapping[str, float]:
    scorers = scorers_of({"my_scores": function}, "clip", 4)
    return all_scores(scorers, nn.Linear(2, 3), processor)


def test_scores_of_own_functions():
    processor: list[str] = []
    assert scores_of("number", processor) == {"my_scores:number": 6}
    assert processor == []  # what is saved with the model is not what functions get
    scores = scores_of("several,number", [])
    first = "my_scores:several first"
    assert scores == {first: 0.25, "my_scores:several second": 2, "my_scores:number": 6}
    assert scores_of(["several", "number"], []) == scores  # as a recipe may have them
    lines = comparison({"merged": scores, "featcal": {**scores, first: 0.5}})
    assert lines[0] == "evaluated by my_scores:several first: merged 0.25, featcal 0.5"


@pytest.mark.parametrize("word", ["nothing", "my_scores:", ":number"])
def test_words_of_another_form(word):
    with pytest.raises(ArgumentTypeError, match=f"expected lm-eval:.* or MODULE.*, got '{word}'"):
        scorer(word)


def test_a_function_must_return_numbers():
    with pytest.raises(ValueError, match=r"my_scores:text gives no number .*'good'"):
        scores_of("text")


def test_an_error_of_a_function_is_named_as_its_own():
    message = r"my_scores:failing raised ZeroDivisionError: division by zero"
    with pytest.raises(ValueError, match=message):
        scores_of("failing")
