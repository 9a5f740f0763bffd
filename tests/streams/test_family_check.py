"""A family's steps are compared with the model's forward pass before anything is calibrated."""

from typing import Any

import pytest
from calibrations import PAPER, PLUS, assert_identical, assert_same, replay, run_fast, run_slow
from model_types import suite_named
from tiny_models import ResidualNet, model_of, sentences, suite_of
from tricky_models import Remembering, Sharing, net_suite

FIRST = ("bert", "distilbert")
"""Classifiers whose head reads nothing but the first position of the last block."""


@pytest.mark.parametrize("kind", [Remembering, Sharing])
def test_blocks_that_depend_on_earlier_ones_are_replayed(kind: Any, caplog: Any):
    suite = net_suite(kind())
    result = run_fast(suite)
    assert result.log.family == "replay" and kind.__name__ in caplog.text
    for word in ("layers.1", "{name: replay, blocks: [layers.*]}", "about 2 times"):
        assert word in caplog.text
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


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2"])
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
