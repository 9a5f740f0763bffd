"""FLOPs, sizes and groups of a dry run are those of the arithmetic."""

import pytest
import torch
from tiny_models import clip_model, t5_model
from torch.nn import functional
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.plan.dry_run import DryRun, dry_run, example_inputs
from fusion_bench_featcal.plan.metering import metered
from fusion_bench_featcal.preflight import empty_model


def clip_run(width: int = 64, batch: int = 3, **settings: object) -> DryRun:
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    with torch.device("meta"):
        model = CLIPVisionModel(config).eval()
    inputs = example_inputs(model, batch, 512, 8)
    return dry_run(model, inputs, FeatCalSettings(**settings), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("sides", [1, 2])
def test_block_of_clip(sides: int):
    d, tokens, batch = 64, 5, 3
    changes = {"mix_alpha": 0.0, "log_drift": False} if sides == 1 else {}
    run, rows = clip_run(d, batch, **changes), batch * tokens
    first, second, last = run.blocks
    once = 24 * rows * d * d + 4 * batch * tokens**2 * d
    assert first.flops["passes"] == sides * once
    assert (first.flops["update"], last.flops["update"]) == (once, (sides - 1) * once)
    assert [(g.width, g.outputs) for g in first.groups] == [
        (d, (d, d, d)),
        (d, (d,)),
        (d, (4 * d,)),
        (4 * d, (d,)),
    ]
    assert [g.has_cross for g in first.groups] == [sides == 2] * 3 + [False]
    whole = 2 * rows * (3 * d**2 + 16 * d**2)  # if all of every Gram matrix were formed
    cross = 2 * rows * (3 * d**2 + 2 * 4 * d**2)  # of three; W_i x_tgt and its products
    assert whole / 2 < first.flops["moments"] - (sides - 1) * cross <= whole
    assert first.groups[3].names == (f"{first.name}.mlp.fc2",)
    assert first.carried == second.carried == last.carried == sides * 4 * rows * d
    assert first.peak >= 4 * rows * (5 * d + 4 * d) * sides  # the modules' inputs
    assert first.calibrated == 12 * d * d + 9 * d + 4 * d
    stem = run.stages[0][0]
    assert stem.flops == {"stem": sides * 2 * batch * (tokens - 1) * 3 * 16 * 16 * d}


def test_excluded_modules_have_no_statistics():
    run = clip_run(modules=["!mlp.fc2"], calibrate_norm=False)
    assert [group.width for group in run.blocks[0].groups] == [64, 64, 64]
    assert run.blocks[0].calibrated == 4 * (64 * 64 + 64) + 64 * 256 + 256


def test_cross_attention_receives_the_encoders_rows():
    model = t5_model(width=64, depths=(3, 4), heads=8).to("meta")
    run = dry_run(model, example_inputs(model, 2, 10, 3), FeatCalSettings(), 2)
    (_, *encoder), (stem, *decoder) = run.stages
    assert (len(encoder), len(decoder)) == (3, 4)
    cross = ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v")
    shapes = {group.names: (group.width, group.outputs) for group in decoder[0].groups}
    assert shapes[tuple(f"{decoder[0].name}.{name}" for name in cross)] == (64, (24, 24))
    assert [block.name for block in decoder] == [f"decoder.block.{i}" for i in range(4)]
    assert not stem.flops  # the encoder does not run again


def test_llamas_shared_inputs_and_float64_sums_at_small_lambda():
    model, settings = empty_model("Llama-3.2-3B-Instruct"), FeatCalSettings()
    inputs = example_inputs(model, 1, 16, 0)
    run, small = (
        dry_run(model, inputs, settings.replace(ridge_lambda=value), 3) for value in (0.05, 1e-5)
    )
    assert run.dtype == torch.bfloat16
    groups, wide = run.blocks[3].groups, small.blocks[3].groups
    assert {(g.width, g.outputs) for g in groups} == {
        (3072, (3072, 1024, 1024)),
        (3072, (3072,)),
        (3072, (8192, 8192)),
        (8192, (3072,)),
    }
    assert groups[1].summed == pytest.approx(4 * 2 * 3072**2, rel=1e-3)
    assert [group.summed for group in wide] == [2 * group.summed for group in groups]


def test_replayed_blocks_cost_the_passes_up_to_them():
    model = clip_model().to("meta")
    layers = (
        "vision_model.encoder.layers.*" if hasattr(model, "vision_model") else "encoder.layers.*"
    )
    settings = FeatCalSettings(family={"name": "replay", "blocks": [layers]})
    run = dry_run(model, example_inputs(model, 2, 0, 0), settings, 2)
    costs = [block.flops["passes"] for block in run.blocks]
    assert costs == sorted(costs) and costs[-1] > 1.5 * costs[0]
    assert set(run.places[-1].needed) == set(model.state_dict())


def test_attention_keeps_no_scores_and_autocast_comes_back():
    x = torch.empty(2, 100, 4, device="meta")
    with metered("passes") as meter, torch.autocast("cuda"):  # as models say to switch it off
        y = functional.scaled_dot_product_attention(x, x, x)
        y = torch.sigmoid(y @ torch.empty(2, 4, 5, device="meta"))
    assert meter.flops == {"passes": 4 * 2 * 100 * 100 * 4 + 2 * 2 * 100 * 4 * 5}
    assert 2 * 4 * 2 * 100 * 5 <= meter.peak < 4 * 2 * 100 * 100
    assert torch.autocast is torch.amp.autocast_mode.autocast


def test_products_in_place_count_and_what_is_gone_does_not():
    with metered("moments") as meter:
        total = torch.empty(8, 8)
        for _ in range(3):
            total.addmm_(torch.empty(8, 5), torch.empty(5, 8))
    assert meter.flops == {"moments": 3 * 2 * 8 * 5 * 8}
    assert meter.peak == 4 * (8 * 8 + 2 * 8 * 5)
