"""What is counted on the meta device is what the arithmetic says."""

import torch
from tiny_models import clip_model
from tiny_t5 import t5_model
from torch import nn
from torch.nn import functional
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.plan.counting import counted, size_of
from fusion_bench_featcal.plan.inputs import example_inputs
from fusion_bench_featcal.plan.work import Group, count_work
from fusion_bench_featcal.preflight import empty_model


def clip_work(width: int = 64, batch: int = 3, **settings: object):
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    with torch.device("meta"):
        model = CLIPVisionModel(config).eval()
    inputs = example_inputs(model, batch, 512, 8)
    return count_work(model, inputs, FeatCalSettings(**settings))  # type: ignore[arg-type]


def test_a_block_of_clip():
    d, tokens, batch = 64, 5, 3
    work = clip_work(d, batch)
    rows = batch * tokens
    first, last = work.blocks
    assert first.counts.flops == 24 * rows * d * d + 4 * batch * tokens**2 * d
    assert [(g.width, g.outputs, g.rows) for g in first.groups] == [
        (d, (d, d, d), rows),
        (d, (d,), rows),
        (d, (4 * d,), rows),
        (4 * d, (d,), rows),
    ]
    assert first.groups[3].names == ("mlp.fc2",)
    assert first.norms == ((d, rows), (d, rows))
    assert first.hidden == first.calls == last.calls == 4 * rows * d
    assert first.counts.peak >= 2 * 4 * rows * 4 * d  # fc1's output and its activation
    assert first.until_last.flops == first.counts.flops - 8 * rows * d * d
    patches = batch * (tokens - 1)
    assert sum(2 * c * n * k * m for (_, n, k, m), c in work.stages[0].stem.products.items()) == (
        2 * patches * 3 * 16 * 16 * d
    )


def test_modules_that_are_left_out_have_no_statistics():
    work = clip_work(modules=["!mlp.fc2"], calibrate_norm=False)
    assert [group.width for group in work.blocks[0].groups] == [64, 64, 64]
    assert work.blocks[0].norms == ()


def test_decoders_cross_attention_receives_the_encoders_rows():
    model = t5_model(width=64, depths=(3, 4), heads=8).to("meta")
    work = count_work(model, example_inputs(model, 2, 10, 3), FeatCalSettings())
    encoder, decoder = work.stages
    assert (len(encoder.blocks), len(decoder.blocks)) == (3, 4)
    cross = ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v")
    assert Group(64, (24, 24), 20, cross, outputs_noted=True) in decoder.blocks[0].groups
    assert Group(10, (64,), 6, ("layer.2.DenseReluDense.wo",)) in decoder.blocks[3].groups
    assert [block.name for block in decoder.blocks] == [f"decoder.block.{i}" for i in range(4)]
    assert encoder.stem.flops == 0
    assert decoder.stem.flops == 0  # the encoder does not run again


def test_a_llamas_shared_inputs_and_half_precision():
    model = empty_model("Llama-3.2-3B-Instruct")
    work = count_work(model, example_inputs(model, 1, 16, 0), FeatCalSettings(samples_per_task=1))
    assert work.itemsize == 2
    settings = FeatCalSettings(samples_per_task=1)
    assert work.entry(settings, 3) == 4
    assert work.entry(settings.replace(ridge_lambda=1e-5), 3) == 8
    assert {(g.width, g.outputs) for g in work.blocks[3].groups} == {
        (3072, (3072, 1024, 1024)),
        (3072, (3072,)),
        (3072, (8192, 8192)),
        (8192, (3072,)),
    }


def test_replayed_blocks_cost_the_passes_up_to_them():
    with torch.device("meta"):
        model = clip_model().to("meta")
    blocks = ["vision_model.encoder.layers.*"]
    if not hasattr(model, "vision_model"):
        blocks = ["encoder.layers.*"]
    settings = FeatCalSettings(family={"name": "replay", "blocks": blocks})
    work = count_work(model, example_inputs(model, 2, 0, 0), settings)
    assert work.replays
    costs = [block.counts.flops for block in work.blocks]
    assert costs == sorted(costs) and costs[-1] > 1.5 * costs[0]
    assert work.blocks[-1].read == work.model


def test_products_attention_and_memory_of_plain_operations():
    def compute() -> torch.Tensor:
        x = torch.empty(2, 8, 4, device="meta")
        y = functional.scaled_dot_product_attention(x, x, x)
        y = y @ torch.empty(2, 4, 5, device="meta")
        with torch.autocast("cuda"):  # what models say to switch it off
            return torch.sigmoid(y).transpose(0, 1)

    result, counts = counted(compute)
    assert result.shape == (8, 2, 5)
    assert dict(counts.products) == {(2, 8, 4, 5): 1}
    assert dict(counts.attention) == {(2, 8, 8, 4): 1}
    assert counts.costly == 2 * 4 * 80
    assert counts.flops == 2 * 2 * 8 * 4 * 5 + 4 * 2 * 8 * 8 * 4
    assert counts.peak >= 2 * 4 * 80
    assert torch.autocast is torch.amp.autocast_mode.autocast


def test_size_of_a_nested_value_counts_storages_once():
    mask = torch.empty(4, device="meta")
    assert size_of({"a": mask, "b": [mask, mask[:2]], "c": (torch.empty(2), None)}) == 24
    assert size_of(nn.Linear(2, 2)) == 0
