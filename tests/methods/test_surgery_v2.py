"""SurgeryV2: corrections behind every block, their training, and the model that carries them."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_corrected_model import PIXELS, classify
from tiny_models import ResidualNet, normal, residual_suite, scatter
from tiny_pools import TASKS, tiny_pool
from torch import Tensor, nn
from transformers import CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import CLIP
from fusion_bench_featcal.fusionbench.pool_models import PoolModels
from fusion_bench_featcal.fusionbench.processors import load_input_processor
from fusion_bench_featcal.fusionbench.saving import save_model
from fusion_bench_featcal.lab.rivals import SurgeryV2, SurgeryV2Algorithm
from fusion_bench_featcal.lab.rivals.corrected_clip import LayerCorrectedModel, clip_blocks
from fusion_bench_featcal.lab.rivals.corrected_model import LayerSurgery, corrected_outputs
from fusion_bench_featcal.lab.rivals.projection import load_projection
from fusion_bench_featcal.lab.rivals.surgery_v2 import site_features

BLOCKS = [f"layers.{i}" for i in range(3)]
QUICK = SurgeryV2(rank=6, steps=20, batch_size=20, learning_rate=1e-2)


def run(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs)


SITES = partial(site_features, BLOCKS, run)


def untrained(method: SurgeryV2, widths: list[int], task: str = "") -> Any:
    return method.module(SimpleNamespace(widths=widths), task)


def pair() -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """A merged model off its expert, float32, and the expert's inputs."""
    torch.manual_seed(0)
    expert = scatter(ResidualNet(), 1, 0.3)
    return scatter(expert, 2, 0.1), expert, [normal(i, 20, 4).float() for i in range(3)]


@torch.no_grad()
def total_drift(merged, expert, inputs, surgery=None) -> float:
    """The published loss over all inputs, written out."""
    x = torch.cat(inputs)
    sides = SITES(merged, x, surgery), SITES(expert, x)
    return sum(float((a - b).abs().mean()) for a, b in zip(*sides, strict=True))


def test_corrections_reach_the_blocks_that_follow_and_go_with_the_context() -> None:
    merged, _, inputs = pair()
    surgery = untrained(QUICK, [6, 6, 6, 2])
    surgery.blocks[0].up.data.fill_(0.3)  # type: ignore[union-attr]
    before = merged(inputs[0])
    hidden = merged.get_submodule("embed")(inputs[0])
    for block, part in zip(BLOCKS, surgery.blocks, strict=True):
        hidden = part(merged.get_submodule(block)(hidden))
    with torch.no_grad(), corrected_outputs(merged, BLOCKS, surgery.blocks):
        corrected = merged(inputs[0])
    torch.testing.assert_close(corrected, merged.get_submodule("head")(hidden))
    assert torch.equal(merged(inputs[0]), before)
    assert not torch.equal(corrected, before)


def test_first_loss_is_the_published_one() -> None:
    merged, expert, inputs = pair()
    method = SurgeryV2(steps=1, batch_size=60)
    method.fit_blocks(merged, expert, BLOCKS, run, inputs, "a")
    wanted = pytest.approx(total_drift(merged, expert, inputs), rel=1e-5)
    assert method.losses == {"a": [wanted]}


def test_tokens_are_averaged_after_the_correction() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)[:, 0]

    x = normal(0, 2, 5, 3)
    with corrected_outputs(Tokens(), ["block"], [nn.ReLU()]) as means:
        Tokens()(x)
    assert not means  # another model's blocks are not touched
    surgery = LayerSurgery([nn.ReLU()], nn.Identity())
    mean, final = site_features(["block"], run, Tokens(), x, surgery)
    torch.testing.assert_close(mean, x.relu().mean(1))
    torch.testing.assert_close(final, x.relu()[:, 0])


def test_planted_drift_of_low_rank_is_removed() -> None:
    """Behind the second block one direction is shifted: a module of rank 6 can shift it back."""
    _, expert, inputs = pair()
    merged = copy.deepcopy(expert)
    planted = torch.linspace(-1, 1, 6)
    drifting: Any = merged.get_submodule("layers.1")
    drifting.register_forward_hook(lambda _, __, output: output + planted)
    method = SurgeryV2(rank=6, steps=100, batch_size=30, learning_rate=3e-2)
    surgery = method.fit_blocks(merged, expert, BLOCKS, run, inputs, "a")
    before = total_drift(merged, expert, inputs)
    assert total_drift(merged, expert, inputs, surgery) < 0.15 * before


def test_training_leaves_both_models_and_repeats_itself() -> None:
    merged, expert, inputs = pair()
    kept = copy.deepcopy((merged, expert))
    first, again, other = (
        QUICK.fit_blocks(merged, expert, BLOCKS, run, inputs, task) for task in ("a", "a", "b")
    )
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
        assert not torch.equal(value, other.state_dict()[name])
        assert value.abs().sum() > 0  # every module was trained
    for model, before in zip((merged, expert), kept, strict=True):
        for name, value in model.state_dict().items():
            assert torch.equal(value, before.state_dict()[name])
    assert not any(parameter.requires_grad for parameter in first.parameters())


def test_no_input_is_refused() -> None:
    suite = residual_suite()
    with pytest.raises(CalibrationError, match="task 'greek' has no inputs"):
        QUICK.fit_blocks(suite.merged, suite.base, BLOCKS, run, [], "greek")


def corrected_model(folders) -> LayerCorrectedModel:
    merged: Any = CLIPVisionModel.from_pretrained(folders["_merged_"])
    projection = load_projection(PoolModels(tiny_pool(folders)), None)
    widths = [merged.config.hidden_size] * len(clip_blocks(merged))
    corrections = {}
    for seed, task in enumerate(TASKS, start=1):
        method = SurgeryV2(rank=3, seed=seed)
        corrections[task] = untrained(method, [*widths, projection.out_features], task)
        for index, parameter in enumerate(corrections[task].parameters()):
            if parameter.shape[1] == 3:  # U
                parameter.data.copy_(0.3 * normal(10 * seed + index, *parameter.shape))
    samples = {task: {"samples": 8, "split": "train"} for task in TASKS}
    curves = {task: [(0, 2.5), (20, 1.25)] for task in TASKS}
    return LayerCorrectedModel(merged, projection, corrections, samples=samples, curves=curves)


def features_by_hand(model: LayerCorrectedModel, task: str) -> Tensor:
    """Block by block, without hooks."""
    tower: Any = model.model
    surgery = model.correction(task)
    call = CLIP.begin(tower, {"pixel_values": PIXELS}, clip_blocks(tower)[0])
    for block, part in zip(clip_blocks(tower), surgery.blocks, strict=True):
        hidden, call = CLIP.step(tower, block, call)
        call = type(call)(part(hidden), call.args, call.kwargs)
    inner = getattr(tower, "vision_model", tower)
    return surgery.final(model.projection(inner.post_layernorm(call.hidden[:, 0])))


def test_classifier_gets_the_features_corrected_behind_every_block(models) -> None:
    model = corrected_model(models)
    for task in TASKS:
        wanted = features_by_hand(model, task)
        torch.testing.assert_close(model.features(task, PIXELS), wanted)
        embeds, _ = classify(models, model, task)
        torch.testing.assert_close(embeds, wanted / wanted.norm(dim=-1, keepdim=True))
    plain = model.model(PIXELS).pooler_output
    torch.testing.assert_close(model(PIXELS).pooler_output, plain)


def test_saved_model_gives_the_same_features(models, tmp_path) -> None:
    model = corrected_model(models)
    model.save_pretrained(tmp_path)
    loaded = LayerCorrectedModel.from_pretrained(tmp_path)
    for task in TASKS:
        assert torch.equal(loaded.features(task, PIXELS), model.features(task, PIXELS))
    assert loaded.samples == model.samples
    assert loaded.curves == model.curves
    with pytest.raises(OSError):  # it does not load without its corrections, unnoticed
        CLIPVisionModel.from_pretrained(tmp_path)


def test_what_cannot_be_loaded_or_corrected_is_named(models, tmp_path) -> None:
    with pytest.raises(CalibrationError, match=r"layer_corrections\.safetensors"):
        LayerCorrectedModel.from_pretrained(tmp_path)
    model = corrected_model(models)
    with pytest.raises(CalibrationError, match=r"task 'three'.*one, two-b\.c"):
        model.features("three", PIXELS)
    with pytest.raises(CalibrationError, match="pass them through this model"):
        model.compute_surgery_features(torch.ones(5, 12), "one")


def test_algorithm_corrects_the_pools_merged_model_which_is_saved(models, tmp_path) -> None:
    algorithm = SurgeryV2Algorithm(steps=3, samples_per_task=8, rank=2, stream="calibration")
    pool = tiny_pool(models)
    found = algorithm.run(pool)
    assert found.tasks == TASKS
    assert found.samples["one"] == {"samples": 8, "split": "train"}
    embeds, _ = classify(models, found, "one")
    uncorrected, _ = classify(models, found.model, "one")
    assert embeds.shape == uncorrected.shape and not torch.equal(embeds, uncorrected)
    save_model(pool, found, tmp_path / "saved", load_input_processor(pool))
    loaded = LayerCorrectedModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.features("one", PIXELS), found.features("one", PIXELS))
    assert (tmp_path / "saved" / "tokenizer_config.json").is_file()
