"""Targets of NLLB and mBART, whose tokenizers write a language in front of or behind them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_languages import LANGUAGES, NEEDS_RELEASE_5, mbart_tokenizer, nllb_tokenizer
from transformers import BartConfig, GenerationConfig

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.generation import logits_and_targets
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_samples import Sample, Seq2SeqTextEncoder

A, B, END, IGNORED = 7, 8, 2, -100
ROW = Text("row 1", "prompt", "a", "a b")


def of(tokenizer: Any, language: str) -> int:
    return tokenizer.convert_tokens_to_ids(language)


@NEEDS_RELEASE_5
def test_a_target_has_the_language_of_its_side():
    tokenizer, (source, target) = nllb_tokenizer(), LANGUAGES
    sample = Seq2SeqTextEncoder(tokenizer, model_start=of(tokenizer, target)).sample(ROW)
    assert sample.ids == [of(tokenizer, source), A, END]
    assert sample.labels == [of(tokenizer, target), A, B, END]


@NEEDS_RELEASE_5
def test_a_target_in_another_language_than_answers_is_refused():
    tokenizer = nllb_tokenizer(tgt_lang=None)  # then it takes the prompt's
    encoder = Seq2SeqTextEncoder(tokenizer, model_start=of(tokenizer, "bb_Latn"))
    message = "row 1: the target begins with aa_Latn, but the models begin answers with bb_Latn"
    with pytest.raises(CalibrationError, match=f"{message}.* tgt_lang into tokenizer_config.json"):
        encoder.sample(ROW)
    tokenised = Text("row 1", "tokens", {"input_ids": [A], "labels": [of(tokenizer, "aa_Latn"), A]})
    with pytest.raises(CalibrationError, match=message):
        encoder.sample(tokenised)


@NEEDS_RELEASE_5
def test_an_answer_is_a_target_as_the_tokenizer_writes_it():
    for tokenizer in (nllb_tokenizer(), mbart_tokenizer()):
        encoder = Seq2SeqTextEncoder(tokenizer)
        labels = encoder.sample(ROW).labels or []
        answer = encoder.until_end(labels)
        assert encoder.answered(Sample([A]), answer, "row 1").labels == labels
    assert labels == [A, B, END, of(tokenizer, "ro_RO")]


@pytest.mark.parametrize(("forced", "expected"), [
    (None, [[9, A, END, IGNORED], [A, B, B, END]]),
    (9, [[IGNORED, A, END, IGNORED], [A, B, B, END]]),
])  # fmt: skip
def test_targets_are_what_greedy_search_chooses(forced, expected):
    """Not a token that it is forced to begin with, and nothing behind the end."""

    class Model:
        config = BartConfig()
        generation_config = GenerationConfig(forced_bos_token_id=forced, eos_token_id=END)

        def __call__(self, labels: torch.Tensor) -> Any:
            return SimpleNamespace(logits=labels)

    labels = torch.tensor([[9, A, END, 9], [A, B, B, END]])
    logits, targets = logits_and_targets(Model(), {"labels": labels})
    assert torch.equal(logits, labels) and targets.tolist() == expected
