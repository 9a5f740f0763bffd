"""Running a decoder-only language model block by block is the model's own forward pass."""

from typing import Any

import pytest
import torch
from tiny_decoders import MAKES, NO_TARGET, decoder_model, sentences
from tiny_models import clip_model, scatter
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import ReplayFamily, resolve_family
from fusion_bench_featcal.families.llama import LLAMA, MODEL_TYPES

BLOCKS = ["model.layers.0", "model.layers.1"]


def stepped(family: Any, model: nn.Module, inputs: Any) -> list[Tensor]:
    """What each block returns, run one by one."""
    call, found = family.begin(model, inputs, family.stages(model)[0][0]), []
    with torch.no_grad():
        for block in family.stages(model)[0]:
            hidden, call = family.step(model, block, call)
            found.append(hidden)
    return found


def test_every_model_type_is_tried_here():
    assert set(MODEL_TYPES) == set(MAKES)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", MAKES)
def test_blocks_equal_the_models_own(make: str, side: str):
    model = scatter(decoder_model(make), 5, 0.2)
    assert LLAMA.stages(model) == [BLOCKS]
    inputs = sentences([5, 9, 7], 10, side=side)
    wanted = stepped(ReplayFamily(blocks=BLOCKS), model, inputs)
    found = stepped(LLAMA, model, inputs)
    assert not torch.equal(found[0], found[1])
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_blocks_return_the_hidden_states_that_transformers_reports():
    model = scatter(decoder_model(), 6, 0.2).double()
    inputs = sentences([5, 9], 9)
    reported = model(**inputs, output_hidden_states=True).hidden_states
    first, second = stepped(LLAMA, model, inputs)
    torch.testing.assert_close(first, reported[1])
    # the last one is reported after the final norm
    torch.testing.assert_close(model.get_submodule("model.norm")(second), reported[2])


@pytest.mark.parametrize("make", ["qwen2", "qwen3", "gemma2"])
def test_blocks_with_a_sliding_window_get_their_own_mask(make: str):
    model = decoder_model(make)
    call = LLAMA.begin(model, sentences([6, 4], 6), BLOCKS[0])
    first, second = (call.kwargs[block]["attention_mask"] for block in BLOCKS)
    assert first.shape == second.shape
    assert not torch.equal(first, second)


def test_sliding_window_matters():
    narrow: Any = scatter(decoder_model("mistral"), 7, 0.2)
    inputs = sentences([9, 5], 9)
    windowed = stepped(LLAMA, narrow, inputs)
    narrow.config.sliding_window = None
    whole = stepped(LLAMA, narrow, inputs)
    torch.testing.assert_close(windowed[0][:, :3], whole[0][:, :3])
    assert (windowed[0][0, 3:] - whole[0][0, 3:]).abs().max() > 1e-3


@pytest.mark.parametrize("make", ["llama", "mistral", "gemma2"])
def test_caches_stay_off(make: str):
    model: Any = decoder_model(make)
    assert model.config.use_cache
    inputs = sentences([6, 4], 6) | {"use_cache": True}
    call = LLAMA.begin(model, inputs, BLOCKS[0])
    for kwargs in call.kwargs.values():
        assert kwargs["past_key_values"] is None
        assert not kwargs.get("use_cache")
    assert inputs["use_cache"] is True  # the caller's inputs are its own


def test_stepping_leaves_its_inputs_and_the_model_alone():
    model = scatter(decoder_model(), 8, 0.2)
    inputs = sentences([5, 9], 9)
    before = model(**inputs).logits
    call = LLAMA.begin(model, inputs, BLOCKS[0])
    kept = call.hidden.clone()
    with torch.no_grad():
        first, following = LLAMA.step(model, BLOCKS[0], call)
        second, _ = LLAMA.step(model, BLOCKS[0], call)
    assert torch.equal(call.hidden, kept)
    assert torch.equal(first, second)
    assert torch.equal(following.hidden, first)
    assert torch.equal(model(**inputs).logits, before)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_forward_that_a_library_replaced_is_back_afterwards():
    model: Any = decoder_model()
    block = model.model.layers[0]
    plain = block.forward
    block.forward = lambda *args, **kwargs: 2 * plain(*args, **kwargs)
    replaced = block.forward
    inputs = sentences([3], 3)
    call = LLAMA.begin(model, inputs, BLOCKS[0])
    assert block.forward is replaced
    found, _ = LLAMA.step(model, BLOCKS[0], call)
    torch.testing.assert_close(found, 2 * plain(call.hidden, **call.kwargs[BLOCKS[0]]))


def test_no_block_runs_before_its_turn():
    model = decoder_model()
    ran: list[str] = []
    for name in BLOCKS:
        attention = model.get_submodule(f"{name}.self_attn")
        attention.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    call = LLAMA.begin(model, sentences([3], 3), BLOCKS[0])
    assert ran == []
    LLAMA.step(model, BLOCKS[0], call)
    assert ran == BLOCKS[:1]


def test_failing_forward_pass_is_not_swallowed():
    model = decoder_model()
    with pytest.raises(IndexError):
        LLAMA.begin(model, {"input_ids": torch.full((1, 3), 99)}, BLOCKS[0])
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_bare_model_and_plain_tensors_give_the_same():
    model = scatter(decoder_model(), 9, 0.2)
    inputs = sentences([4, 4], 4)
    bare = model.get_submodule("model")
    assert LLAMA.stages(bare) == [["layers.0", "layers.1"]]
    wanted = stepped(LLAMA, model, inputs)
    for again in (stepped(LLAMA, bare, inputs), stepped(LLAMA, model, inputs["input_ids"])):
        for ours, theirs in zip(again, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_block_called_without_names_is_refused():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Bilinear(3, 3, 3)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x, x)

    with pytest.raises(CalibrationError, match=r"layers\.0 of Odd.*2 arguments.*replay"):
        LLAMA.begin(Odd(), torch.ones(1, 3), "layers.0")


def test_model_without_decoder_layers_is_refused():
    with pytest.raises(CalibrationError, match=r"CLIPVisionModel has no decoder layers.*family"):
        LLAMA.stages(clip_model())


@pytest.mark.parametrize("side", ["left", "right"])
def test_all_rows_are_those_that_are_no_padding(side: str):
    inputs = sentences([2, 5], 6, side=side)
    assert LLAMA.row_weights(inputs, 0, "all") is inputs["attention_mask"]
    assert LLAMA.row_weights({"input_ids": inputs["input_ids"]}, 0, "all") is None
    assert LLAMA.row_weights(inputs["input_ids"], 0, "all") is None


def test_target_rows_are_those_that_predict_a_label():
    skip = NO_TARGET
    inputs = {
        "input_ids": torch.ones(4, 5, dtype=torch.long),
        "attention_mask": torch.tensor(
            [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
        ),
        "labels": torch.tensor(
            [
                [skip, skip, 7, 8, skip],  # padded on the right
                [skip, skip, skip, 7, 8],  # padded on the left
                [skip, skip, 6, 7, 8],  # no prompt: nothing predicts the first word
                [9, skip, skip, skip, 0],  # token 0 is a target like any other
            ]
        ),
    }
    wanted = [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 0]]
    found = LLAMA.row_weights(inputs, 0, "targets")
    assert found is not None
    assert found.tolist() == wanted
    del inputs["attention_mask"]
    found = LLAMA.row_weights(inputs, 0, "targets")
    assert found is not None
    assert found.tolist() == [*wanted[:2], [0, 1, 1, 1, 0], wanted[3]]


def test_targets_without_labels_are_refused():
    inputs = sentences([2, 5], 6)
    del inputs["labels"]
    with pytest.raises(CalibrationError, match=r"method\.decoder_rows=targets.*labels.*input_ids"):
        LLAMA.row_weights(inputs, 0, "targets")
    with pytest.raises(CalibrationError, match=r"method\.decoder_rows=targets.*Tensor"):
        LLAMA.row_weights(inputs["input_ids"], 0, "targets")


def test_mask_that_cannot_tell_padding_is_refused():
    with pytest.raises(CalibrationError, match=r"attention_mask.*\(2, 1, 5, 5\)"):
        LLAMA.row_weights({"attention_mask": torch.ones(2, 1, 5, 5)}, 0, "all")


@pytest.mark.parametrize("make", MAKES)
def test_auto_finds_the_family_by_the_model_type(make: str):
    assert resolve_family("auto", decoder_model(make)) is LLAMA
    assert resolve_family("llama", decoder_model(make)) is LLAMA
