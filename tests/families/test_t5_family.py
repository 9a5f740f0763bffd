"""Running T5 block by block is the model's own forward pass."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import scatter
from tiny_t5 import REPLAY, t5_batch, t5_model
from torch import Tensor, nn
from transformers import T5EncoderModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import T5, Family, resolve_family

SHAPES: list[dict[str, Any]] = [
    {"kind": "t5", "gated": True, "untied": True, "seed": 1},
    {"kind": "t5", "gated": False, "depths": (1, 3), "seed": 2},
    {"kind": "mt5", "depths": (3, 1), "heads": 1, "width": 5, "seed": 3},
    {"kind": "umt5", "seed": 4},
    {"kind": "umt5", "gated": False, "depths": (2, 3), "seed": 5},
]
INPUTS = t5_batch([3, 7, 5], [4, 1, 3], seed=0, pad=(1, 1))


def model_of(**shape: Any) -> nn.Module:
    return scatter(t5_model(**shape).double(), 5, 0.3)


def run_stage(family: Family, model: nn.Module, stage: int, inputs: Any = None) -> list[Tensor]:
    blocks = family.stages(model)[stage]
    found = []
    with torch.no_grad():
        call = family.begin(model, inputs or INPUTS, blocks[0])
        for block in blocks:
            hidden, call = family.step(model, block, call)
            found.append(hidden)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_equal_the_replay_family(shape: dict[str, Any]):
    model = model_of(**shape)
    replay = resolve_family(REPLAY, model)
    assert resolve_family("auto", model) is T5
    assert T5.stages(model) == replay.stages(model)
    assert [len(stage) for stage in T5.stages(model)] == list(shape.get("depths", (2, 2)))
    for stage in (0, 1):
        found, wanted = run_stage(T5, model, stage), run_stage(replay, model, stage)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_are_the_hidden_states_that_transformers_reports(shape: dict[str, Any]):
    model = model_of(**shape)
    with torch.no_grad():
        reported = model(**INPUTS, output_hidden_states=True)
    for stage, name in enumerate(("encoder", "decoder")):
        states = reported[f"{name}_hidden_states"]
        found = run_stage(T5, model, stage)
        # the last one is reported after the final norm
        last = model.get_submodule(f"{name}.final_layer_norm")(found[-1]).detach()
        for ours, theirs in zip([*found[:-1], last], states[1:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1])
def test_position_bias_of_the_first_block_is_handed_on(stage: int):
    model = model_of(depths=(3, 3))
    blocks = T5.stages(model)[stage]
    with torch.no_grad():
        first = T5.begin(model, INPUTS, blocks[0])
        _, second = T5.step(model, blocks[0], first)
        hidden, third = T5.step(model, blocks[1], second)
        assert second.bias is not None
        assert third.bias is second.bias
        assert second.bias.shape == (1, 2, *hidden.shape[1:2] * 2)  # none for each sample
        alone = replace(second, bias=torch.zeros_like(second.bias))
        without, _ = T5.step(model, blocks[1], alone)
    assert (hidden - without).abs().max() > 1e-3


def test_stepping_again_gives_the_same_although_the_model_would_cache():
    model = model_of()
    for stage in T5.stages(model):
        with torch.no_grad():
            call = T5.begin(model, INPUTS, stage[0])
            assert call.kwargs.get("past_key_values") is None
            first, _ = T5.step(model, stage[0], call)
            second, _ = T5.step(model, stage[0], call)
        assert torch.equal(first, second)


def test_encoder_counts_its_mask_and_the_decoder_its_labels():
    given: dict[str, Any] = INPUTS
    for rows in ("all", "targets"):
        assert torch.equal(T5.row_weights(given, 0, rows), given["attention_mask"])  # pyright: ignore[reportArgumentType]
        counted = T5.row_weights(given, 1, rows)
        assert counted is not None
        assert torch.equal(counted > 0, given["labels"] != -100)
    assert T5.other_rows(given, 0) == {}
    fed = T5.other_rows(given, 1)
    assert set(fed) == {"EncDecAttention.k", "EncDecAttention.v"}
    assert all(mask is given["attention_mask"] for mask in fed.values())


def test_decoder_mask_decides_unless_targets_are_asked_for():
    mask = torch.ones(3, 5, dtype=torch.long)
    given: Any = INPUTS | {"decoder_input_ids": mask, "decoder_attention_mask": mask}
    assert T5.row_weights(given, 1, "all") is mask
    targets = T5.row_weights(given, 1, "targets")
    assert targets is not None
    assert torch.equal(targets > 0, INPUTS["labels"] != -100)
    del given["labels"]
    assert T5.row_weights(given, 1, "all") is mask
    with pytest.raises(CalibrationError, match=r"method\.decoder_rows=targets.*labels.*=all"):
        T5.row_weights(given, 1, "targets")
    del given["decoder_attention_mask"]
    assert T5.row_weights(given, 1, "all") is None


def test_inputs_that_say_nothing_about_the_decoder_are_refused():
    model = model_of()
    for inputs in ({"input_ids": INPUTS["input_ids"], "labels": None}, INPUTS["input_ids"]):
        with pytest.raises(CalibrationError, match=r"labels, or decoder_input_ids"):
            T5.begin(model, inputs, "encoder.block.0")


def test_model_without_a_decoder_is_refused():
    encoder = T5EncoderModel(t5_model().config)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CalibrationError, match=r"T5EncoderModel has no.*decoder\.block.*replay"):
        resolve_family("auto", encoder).stages(encoder)
