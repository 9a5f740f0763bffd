"""A family's steps are compared with the model's own forward pass before anything is calibrated."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import (
    PAPER,
    PLUS,
    assert_identical,
    assert_same,
    distance,
    replay,
    run_fast,
    run_slow,
)
from model_types import ROWS
from tiny_models import (
    ResidualBlock,
    ResidualNet,
    Suite,
    sentences,
    suite_of,
    without_labels,
)
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from tricky_models import Remembering, net_suite

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.lab.rivals import RegMean
from fusion_bench_featcal.streams.family_check import checked_family, reads_first_position
from fusion_bench_featcal.streams.samples import take


class Sharing(ResidualNet):
    """Blocks hand a mapping around, into which each writes what the next one reads."""

    class Block(ResidualBlock):
        def forward(self, hidden: Tensor, shared: Any = None) -> Tensor:
            before = shared.get("before", 0)
            shared["before"] = super().forward(hidden)
            return shared["before"] + 0.1 * before

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block(6, 9) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden, shared = self.embed(x), {}
        for layer in self.layers:
            hidden = layer(hidden, shared)
        return self.head(hidden)


class Backwards(ResidualNet):
    """Blocks run from the last to the first."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in reversed(self.layers):
            hidden = layer(hidden)
        return self.head(hidden)


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
    return replace(suite, left=tuple(u for u in unused if f"model.layers.{u}" in names))


def test_blocks_that_depend_on_earlier_ones_are_replayed(caplog: Any):
    suite = net_suite(Remembering())
    with caplog.at_level(logging.WARNING):
        result = run_fast(suite)
    assert result.log.family == "replay"
    for words in ("Remembering", "layers.1", "{name: replay, blocks: [layers.*]}", "about 2 times"):
        assert words in caplog.text
    assert_identical(result.model, run_fast(suite, PAPER, replay(suite)).model)
    assert_same(result.model, run_slow(suite).model)


def test_blocks_that_write_into_their_arguments_are_replayed(caplog: Any):
    suite = net_suite(Sharing())
    result = run_fast(suite)
    assert result.log.family == "replay" and "Sharing" in caplog.text
    assert_same(result.model, run_slow(suite).model)


def test_gemma3n_is_replayed(caplog: Any):
    suite = gemma3n_suite()
    assert run_fast(suite).log.family == "replay"
    assert "Gemma3nForCausalLM cannot be run one by one" in caplog.text


def test_family_that_was_named_is_not_replaced():
    suite = net_suite(Remembering())
    expected = r"family=stack: the blocks of Remembering .* Set method\.family=\{name: replay"
    with pytest.raises(CalibrationError, match=expected):
        run_fast(suite, PAPER, "stack")


def test_blocks_in_another_order_are_refused():
    with pytest.raises(CalibrationError, match=r"Backwards runs the blocks \['layers\.2', .*once"):
        run_fast(net_suite(Backwards()))


def test_blocks_that_fit_are_not_replayed(caplog: Any):
    suite = net_suite(ResidualNet())
    result = run_fast(suite)
    assert result.log.family == "stack" and not caplog.text
    assert_same(result.model, run_slow(suite).model)


def test_model_is_left_as_it_was():
    suite = net_suite(ResidualNet())
    suite.merged.train()
    run_fast(suite)
    assert all(module.training for module in suite.merged.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in suite.merged.modules())


def test_regmean_falls_back_too(caplog: Any):
    suite = net_suite(Remembering())
    found, wanted = (
        RegMean(samples_per_task=9, **family).merge_models(suite.base, suite.experts, suite.inputs)
        for family in ({}, {"family": replay(suite)})
    )
    assert "method.family={name: replay" in caplog.text
    assert_identical(found, wanted)


def test_missing_samples_are_refused_as_ever():
    suite = net_suite(ResidualNet())
    with pytest.raises(CalibrationError, match="task a has 0 calibration samples"):
        run_fast(replace(suite, inputs=suite.inputs | {"a": []}), samples_per_task=3)


def test_token_outside_the_vocabulary_is_refused_with_its_task():
    suite = next(row for row in ROWS if row.name == "gpt2").suite()
    assert suite is not None
    suite.inputs["task_0"][0]["input_ids"][0, 0] = 99
    with pytest.raises(CalibrationError, match=r"task_0.*(99|outside a table)"):
        run_fast(suite)


@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_featcal_plus_refuses_relative_positions(name: str):
    suite = next(row for row in ROWS if row.name == name).suite()
    assert suite is not None
    expected = r"receives a table of relative positions.*modules=\['!.*attention\.self"
    with pytest.raises(CalibrationError, match=expected):
        run_fast(suite, **PLUS)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_relative_positions_count_in_a_batch_of_one_sample():
    suite = next(row for row in ROWS if row.name == "deberta-v2").suite()
    assert suite is not None
    for batches in suite.inputs.values():
        batches[:] = [{name: value[:1] for name, value in batch.items()} for batch in batches]
    assert_same(run_fast(suite).model, run_slow(suite).model)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("bert", True),
        ("vit", True),
        ("distilbert", True),
        ("dinov2", False),  # reads the mean of the other positions, too
        ("gpt2", False),
        ("bert, bare", False),
    ],
)
def test_class_token_closes_where_the_head_reads_nothing_else(name: str, first: bool):
    suite = next(row for row in ROWS if row.name == name).suite()
    assert suite is not None
    family: Any = resolve_family("auto", suite.merged)
    samples = take("task_0", suite.inputs["task_0"], FeatCalSettings(), suite.merged)
    found: Any = checked_family(
        family, "auto", suite.merged, {"task_0": samples}, needs_closing=True
    )
    hidden = torch.zeros(2, 4, 3)
    rows: Any = found.closing_rows(suite.merged, hidden)
    assert family.closing_rows(suite.merged, hidden) is None
    assert rows.tolist() == [[1, 0, 0, 0]] * 2 if first else rows is None


@pytest.mark.parametrize("name", ["bert", "vit", "gpt_neox", "modernbert"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_featcal_plus_calibrates_a_stack_as_its_replay(name: str):
    suite = next(row for row in ROWS if row.name == name).suite()
    assert suite is not None
    found = run_fast(suite, **PLUS).model
    assert distance(found, suite.merged) > 0.1
    family: Any = resolve_family("auto", suite.merged)
    if reads_first_position(suite.merged, suite.blocks[-1], suite.inputs["task_0"][0]):
        return  # replay does not know which rows close
    assert_identical(found, run_fast(suite, PAPER, replay(suite), **PLUS).model)
    assert family.name == "stack"


def test_masked_language_model_is_calibrated_at_its_positions():
    config = AutoConfig.for_model(
        "bert", hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        vocab_size=30,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config)
    blocks = [f"bert.encoder.layer.{n}" for n in range(2)]
    inputs = {"a": [sentences([3, 6], 7)], "b": [sentences([5, 4], 6, seed=1)]}
    suite = suite_of(model.eval(), inputs, blocks, 1)
    found = run_fast(suite, decoder_rows="targets").model
    assert_same(found, run_slow(suite).model)
