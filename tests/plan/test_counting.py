"""Counts on the meta device are those of the arithmetic."""

import torch
from tiny_models import clip_model, t5_model
from torch.nn import functional
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.plan.counting import (
    Group,
    Work,
    count_work,
    example_inputs,
    metered,
    size_of,
)
from fusion_bench_featcal.plan.memory import sum_sizes
from fusion_bench_featcal.preflight import empty_model


def clip_work(width: int = 64, batch: int = 3, **settings: object) -> Work:
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


def test_block_of_clip():
    d, tokens, batch = 64, 5, 3
    work, rows = clip_work(d, batch), batch * tokens
    first, last = work.blocks
    assert first.flops == 24 * rows * d * d + 4 * batch * tokens**2 * d
    assert [(g.width, g.outputs, g.rows) for g in first.groups] == [
        (d, (d, d, d), rows),
        (d, (d,), rows),
        (d, (4 * d,), rows),
        (4 * d, (d,), rows),
    ]
    assert [g.is_narrow for g in first.groups] == [False, False, False, True]
    assert first.groups[3].names == ("mlp.fc2",)
    assert first.hidden == first.carried == last.carried == 4 * rows * d
    assert first.recorded == 4 * rows * (5 * d + 4 * d)  # two of them before norms
    assert first.peak >= 2 * 4 * rows * 4 * d  # fc1's output and its activation
    stem = work.stages[0][0]
    assert stem.flops == 2 * batch * (tokens - 1) * 3 * 16 * 16 * d


def test_excluded_modules_have_no_statistics():
    work = clip_work(modules=["!mlp.fc2"], calibrate_norm=False)
    assert [group.width for group in work.blocks[0].groups] == [64, 64, 64]
    assert work.blocks[0].calibrated == 4 * (64 * 64 + 64) + 64 * 256 + 256


def test_cross_attention_receives_the_encoders_rows():
    model = t5_model(width=64, depths=(3, 4), heads=8).to("meta")
    work = count_work(model, example_inputs(model, 2, 10, 3), FeatCalSettings())
    (_, *encoder), (stem, *decoder) = work.stages
    assert (len(encoder), len(decoder)) == (3, 4)
    cross = ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v")
    assert Group(64, (24, 24), 20, cross) in decoder[0].groups
    assert Group(10, (64,), 6, ("layer.2.DenseReluDense.wo",)) in decoder[3].groups
    assert [block.name for block in decoder] == [f"decoder.block.{i}" for i in range(4)]
    assert stem.flops == 0  # the encoder does not run again


def test_llamas_shared_inputs_and_float64_sums_at_small_lambda():
    model, settings = empty_model("Llama-3.2-3B-Instruct"), FeatCalSettings()
    work = count_work(model, example_inputs(model, 1, 16, 0), settings)
    assert work.dtype == torch.bfloat16
    assert sum_sizes(work, settings, 3) == (4, 4)
    assert sum_sizes(work, settings.replace(ridge_lambda=1e-5), 3) == (8, 8)
    assert {(g.width, g.outputs) for g in work.blocks[3].groups} == {
        (3072, (3072, 1024, 1024)),
        (3072, (3072,)),
        (3072, (8192, 8192)),
        (8192, (3072,)),
    }


def test_replayed_blocks_cost_the_passes_up_to_them():
    model = clip_model().to("meta")
    layers = (
        "vision_model.encoder.layers.*" if hasattr(model, "vision_model") else "encoder.layers.*"
    )
    settings = FeatCalSettings(family={"name": "replay", "blocks": [layers]})
    work = count_work(model, example_inputs(model, 2, 0, 0), settings)
    assert work.whole_model
    costs = [block.flops for block in work.blocks]
    assert costs == sorted(costs) and costs[-1] > 1.5 * costs[0]
    assert set(work.places[-1].needed) == set(model.state_dict())


def test_attention_keeps_no_scores_and_autocast_comes_back():
    x = torch.empty(2, 100, 4, device="meta")
    with metered() as meter, torch.autocast("cuda"):  # as models say to switch it off
        y = functional.scaled_dot_product_attention(x, x, x)
        y = torch.sigmoid(y @ torch.empty(2, 4, 5, device="meta"))
    assert meter.flops == 4 * 2 * 100 * 100 * 4 + 2 * 2 * 100 * 4 * 5
    assert 2 * 4 * 2 * 100 * 5 <= meter.peak < 4 * 2 * 100 * 100
    assert torch.autocast is torch.amp.autocast_mode.autocast


def test_size_counts_storages_once():
    mask = torch.empty(4, device="meta")
    assert size_of({"a": mask, "b": [mask, mask[:2]], "c": (torch.empty(2), None)}) == 24
