"""Prompt and target are tokenised as one text, as in the training of decoder-only models."""

from typing import Any

import pytest
from tiny_tokenizers import KINDS, trained_tokenizer

from fusion_bench_featcal.data.text_formats import read_row
from fusion_bench_featcal.data.text_samples import IGNORED, TextEncoder

kinds = pytest.mark.parametrize("kind", [*KINDS, "slow"])


def encoded(kind: str, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return a row's tokens, and those of them that are targets."""
    sample = TextEncoder(trained_tokenizer(kind), "causal").sample(read_row(row, ""))
    assert sample.labels is not None
    targets = [label for label in sample.labels if label != IGNORED]
    assert sample.ids[-len(targets) :] == targets and len(sample.labels) == len(sample.ids)
    return sample.ids, targets


@kinds
@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ("colour of lamp :", " red"),
        ("number of river :", " 42 10"),
        ("colour of lamp : ", "red"),
        ("colour of lamp :\n", "red"),
        ("colour of lamp :", "\nred blue"),
    ],
)
def test_a_text_is_that_of_the_training(kind: str, prompt: str, target: str):
    tokenizer = trained_tokenizer(kind)
    ids, targets = encoded(kind, {"prompt": prompt, "target": target})
    assert ids == [*tokenizer(prompt + target)["input_ids"], tokenizer.eos_token_id]
    words = tokenizer.decode(targets[:-1]).split(), tokenizer.decode(ids[1 : -len(targets)]).split()
    assert words == (target.split(), prompt.split())
    assert targets[-1] == tokenizer.eos_token_id


@kinds
def test_a_target_without_a_blank_is_a_text_of_its_own(kind: str):
    tokenizer = trained_tokenizer(kind)
    ids, targets = encoded(kind, {"prompt": "colour of lamp", "target": "red"})
    alone = tokenizer("red", add_special_tokens=False)["input_ids"]
    assert targets == [*alone, tokenizer.eos_token_id]
    assert ids == [*tokenizer("colour of lamp")["input_ids"], *targets]


@kinds
def test_a_chat_is_rendered_and_tokenised_as_one_text(kind: str):
    tokenizer = trained_tokenizer(kind)
    turns = [
        {"role": "user", "content": "lamp"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "river"},
        {"role": "assistant", "content": "blue"},
    ]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    ids, targets = encoded(kind, {"messages": turns})
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(targets).split() == ["blue</s>"] or targets[-1] == 2
    assert "blue" in tokenizer.decode(targets) and "river" not in tokenizer.decode(targets)
