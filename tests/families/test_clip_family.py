"""Running CLIP block by block is the model's own forward pass."""

from typing import Any

import pytest
import torch
from tiny_models import blocks_of, clip_model, normal, scatter
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, CLIPVisionConfig, CLIPVisionModelWithProjection

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import CLIP, ReplayFamily, resolve_family

BLOCK = "CLIPEncoderLayer"
SHAPES: list[dict[str, Any]] = [
    {"seed": 0},
    {"seed": 1, "width": 8, "heads": 4, "hidden": 5, "depth": 3},
    {"seed": 2, "width": 6, "heads": 1, "depth": 1},
]


def images(seed: int, count: int = 3) -> dict[str, Tensor]:
    return {"pixel_values": normal(seed, count, 3, 8, 8)}


def outputs_of(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What the blocks receive and hand on in the model's own forward pass."""
    received: list[Tensor] = []
    returned: list[Tensor] = []
    for name in blocks_of(model, BLOCK):
        block = model.get_submodule(name)
        block.register_forward_pre_hook(
            lambda _m, args, named: received.append(args[0] if args else named["hidden_states"]),
            with_kwargs=True,
        )
        block.register_forward_hook(
            lambda _m, _a, out: returned.append(out if isinstance(out, Tensor) else out[0])
        )
    with torch.no_grad():
        model(**inputs)
    return received, returned


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_replayed_blocks_equal_the_models_own(shape: dict[str, Any], attention: str):
    model = scatter(clip_model(**shape), 5, 0.2).double()
    model.set_attn_implementation(attention)  # pyright: ignore[reportCallIssue]
    inputs = images(shape["seed"])
    ((*blocks,),) = CLIP.stages(model)
    with torch.no_grad():
        call = CLIP.begin(model, inputs, blocks[0])
        starts, found = [], []
        for block in blocks:
            starts.append(call.hidden)
            hidden, call = CLIP.step(model, block, call)
            found.append(hidden)
    received, returned = outputs_of(model, inputs)
    assert len(found) == shape.get("depth", 2)
    for ours, theirs in zip(starts + found, received + returned, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_replayed_blocks_are_the_hidden_states_that_transformers_reports():
    model = scatter(clip_model(depth=3), 6, 0.2)
    inputs = {"pixel_values": images(3)["pixel_values"].float()}
    with torch.no_grad():
        reported = model(**inputs, output_hidden_states=True).hidden_states
        (blocks,) = CLIP.stages(model)
        call = CLIP.begin(model, inputs, blocks[0])
        torch.testing.assert_close(call.hidden, reported[0])
        for block, wanted in zip(blocks, reported[1:], strict=True):
            hidden, call = CLIP.step(model, block, call)
            torch.testing.assert_close(hidden, wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_replay_family_equals_the_clip_family(shape: dict[str, Any]):
    model = scatter(clip_model(**shape), 7, 0.2).double()
    inputs = images(shape["seed"])
    (blocks,) = CLIP.stages(model)
    replay = ReplayFamily(blocks=blocks)
    assert replay.stages(model) == [blocks]
    with torch.no_grad():
        call, again = (family.begin(model, inputs, blocks[0]) for family in (CLIP, replay))
        for block in blocks:
            hidden, call = CLIP.step(model, block, call)
            wanted, again = replay.step(model, block, again)
            assert torch.equal(hidden, wanted)


def test_blocks_come_in_forward_order_beyond_ten():
    model = clip_model(depth=12, width=4, heads=1, hidden=4)
    (blocks,) = CLIP.stages(model)
    assert [int(name.rpartition(".")[2]) for name in blocks] == list(range(12))
    assert blocks == blocks_of(model, BLOCK)


def test_stepping_leaves_its_inputs_and_the_model_alone():
    model = scatter(clip_model(), 8, 0.2)
    (blocks,) = CLIP.stages(model)
    inputs = {"pixel_values": images(4)["pixel_values"].float()}
    with torch.no_grad():
        call = CLIP.begin(model, inputs, blocks[0])
        kept = call.hidden.clone()
        first, _ = CLIP.step(model, blocks[0], call)
        second, _ = CLIP.step(model, blocks[0], call)
    assert torch.equal(call.hidden, kept)
    assert torch.equal(first, second)
    hooks = [h for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks) if h]
    assert not hooks


def test_failing_forward_pass_is_not_swallowed():
    model = clip_model()
    (blocks,) = CLIP.stages(model)
    with pytest.raises(ValueError, match=r"[Ii]mage size"):
        CLIP.begin(model, {"pixel_values": torch.zeros(1, 3, 16, 16)}, blocks[0])
    hooks = [h for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks) if h]
    assert not hooks


def test_every_position_of_an_image_counts():
    assert CLIP.row_weights(images(0), 0, "targets") is None
    assert CLIP.other_rows(images(0), 0) == {}


def test_auto_finds_clip_by_its_model_type():
    assert resolve_family("auto", clip_model()) is CLIP
    assert resolve_family("clip", clip_model()) is CLIP
    config = CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=8,
    )
    projected = CLIPVisionModelWithProjection(config)
    assert CLIP.stages(projected) == [blocks_of(projected, BLOCK)]


def test_model_with_a_text_tower_is_refused():
    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = {"vocab_size": 10, "max_position_embeddings": 4, "eos_token_id": 0, "bos_token_id": 0}
    both = CLIPConfig(
        text_config=small | text | {"pad_token_id": 0},
        vision_config=small | {"image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    with pytest.raises(CalibrationError, match=r"CLIPModel has a text tower.*vision_model"):
        CLIP.stages(CLIPModel(both))


def test_model_without_encoder_layers_is_refused():
    with pytest.raises(CalibrationError, match=r"Linear has no vision encoder layers.*family"):
        CLIP.stages(nn.Linear(2, 2))
