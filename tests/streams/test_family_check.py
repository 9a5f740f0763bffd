"""A family's steps are compared with the model's own forward pass before anything is calibrated."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import PAPER, PLUS, assert_identical, assert_same, replay, run_fast, run_slow
from model_types import suite_named
from tiny_models import (
    ResidualNet,
    Suite,
    model_of,
    sentences,
    suite_of,
    without_labels,
)
from transformers import AutoConfig, AutoModelForCausalLM
from tricky_models import Remembering, Sharing, net_suite

FIRST = ("bert", "distilbert", "modernbert")
"""Classifiers whose head reads nothing but the first position of the last block."""


def gemma3n_suite() -> Suite:
    """Later blocks of Gemma-3n take keys and values from earlier ones."""
    config = AutoConfig.for_model(
        "gemma3n_text", vocab_size=30, vocab_size_per_layer_input=30, hidden_size=8,
        hidden_size_per_layer_input=4, intermediate_size=[12] * 4, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=4,
        activation_sparsity_pattern=[0.0] * 4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    inputs = {"a": [{"input_ids": without_labels(sentences([6, 6], 6))["input_ids"]}]}
    suite = suite_of(model, inputs, [f"model.layers.{n}" for n in range(4)], 1)
    unused = [f"{n}.self_attn.{k}_proj" for n in (2, 3) for k in "kv"]  # 5.x has none
    names = [name for name, _ in model.named_modules()]
    return replace(suite, excluded=tuple(u for u in unused if f"model.layers.{u}" in names))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: net_suite(Remembering()),
         ("Remembering", "layers.1", "{name: replay, blocks: [layers.*]}", "about 2 times")),
        (lambda: net_suite(Sharing()), ("Sharing",)),
        (gemma3n_suite, ("Gemma3nForCausalLM cannot be run one by one",)),
    ],
)  # fmt: skip
def test_blocks_that_depend_on_earlier_ones_are_replayed(make: Any, words: Any, caplog: Any):
    suite = make()
    result = run_fast(suite)
    assert result.log.family == "replay" and all(word in caplog.text for word in words)
    if "layers.0" in suite.blocks:
        assert_identical(result.model, run_fast(suite, PAPER, replay(suite)).model)
        assert_same(result.model, run_slow(suite).model)


def test_blocks_that_fit_are_not_replayed(caplog: Any):
    suite = net_suite(ResidualNet())
    result = run_fast(suite)
    assert result.log.family == "stack" and not caplog.text
    assert_same(result.model, run_slow(suite).model)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_relative_positions_count_in_a_batch_of_one_sample():
    suite = suite_named("deberta-v2")
    for batches in suite.inputs.values():
        batches[:] = [{name: value[:1] for name, value in batch.items()} for batch in batches]
    assert_same(run_fast(suite).model, run_slow(suite).model)


@pytest.mark.parametrize("name", [*FIRST, "gpt2", "bert, bare"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_plus_reads_the_first_position_alone_where_the_head_does(name: str):
    suite = suite_named(name)
    result = run_fast(suite, **PLUS)
    tasks = result.log.of_kind("task")
    rows = {(r["block"] == suite.blocks[-1], r["rows"] == r["samples"]) for r in tasks}
    assert rows == {(False, False), (True, name in FIRST)}
    if name not in FIRST:  # `replay` does not know which rows are read
        assert_identical(result.model, run_fast(suite, PAPER, replay(suite), **PLUS).model)


def test_masked_language_model_is_calibrated_at_its_positions():
    inputs: dict[str, list] = {"a": [sentences([3, 6], 7)], "b": [sentences([5, 4], 6, seed=1)]}
    suite = suite_of(model_of("bert"), inputs, [f"bert.encoder.layer.{n}" for n in range(2)], 1)
    assert_same(run_fast(suite, decoder_rows="targets").model, run_slow(suite).model)
