"""The training steps: augmentation, colours, and what each phase may change."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fusion_bench_featcal.suites import clip_training, image
from fusion_bench_featcal.suites.clip_training import Phase, Recipe, TrainingSet

STILL = Phase(1, 1e-3, 0.0, 0, degrees=0, scaling=0, shift=0)
TINY = Recipe(
    pretraining=replace(Recipe().pretraining, steps=1),
    finetuning=replace(Recipe().finetuning, steps=1),
    tasks_per_step=2,
    images_per_task=3,
    expert_batch=3,
)


@pytest.fixture
def grey():
    pictures, _ = image.load_arrays("mini_mnist").rows("test")
    return torch.from_numpy(pictures[:8].astype(np.float32) / 255)


@pytest.fixture
def model():
    return clip_training.new_model(image.load_processor().tokenizer.get_vocab(), seed=3)


def generator():
    return torch.Generator().manual_seed(5)


def quiet(_: str) -> None:
    pass


def test_no_turn_scaling_or_shift_leaves_the_picture(grey):
    torch.testing.assert_close(clip_training.augment(grey, STILL, generator()), grey)


def test_augmentation_moves_each_picture_its_own_way_within_bounds(grey):
    same = grey[:1].expand(6, -1, -1)
    moved = clip_training.augment(same, replace(STILL, shift=0.1), generator())
    assert len({picture.numpy().tobytes() for picture in moved}) == 6
    assert moved.min() >= 0 and moved.max() <= 1
    # a shift of at most a tenth of 28 pixels moves the centre of mass by at most 2.8 pixels
    columns = torch.arange(28.0)
    centre = (moved.sum(dim=1) * columns).sum(dim=1) / moved.sum(dim=(1, 2))
    start = (same.sum(dim=1) * columns).sum(dim=1) / same.sum(dim=(1, 2))
    assert 0 < (centre - start).abs().max() <= 2.8 + 1e-3


def test_augmentation_is_seeded(grey):
    phase = Recipe().finetuning
    first, second = (clip_training.augment(grey, phase, generator()) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", image.ALL8)
def test_painted_pixels_are_what_loader_and_processor_give(name):
    pictures, _ = image.load_arrays(name).rows("test")
    rows = torch.from_numpy(pictures[:4].astype(np.float32) / 255)
    items = [image.load_split(name, "test")[index]["image"] for index in range(4)]
    expected = image.load_processor()(images=items, return_tensors="pt")["pixel_values"]
    ours = clip_training.painted_pixels(rows, image.find_task(name))
    # the loader rounds colours to whole steps of 1/255, and .35 is the unit
    torch.testing.assert_close(ours, expected, atol=0.5 / 255 / 0.35 + 1e-5, rtol=0)


def test_the_untrained_model_depends_on_its_seed_only(model):
    vocabulary = image.load_processor().tokenizer.get_vocab()
    state = torch.random.get_rng_state()
    again = clip_training.new_model(vocabulary, seed=3)
    other = clip_training.new_model(vocabulary, seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    weights, same, different = (m.visual_projection.weight for m in (model, again, other))
    assert torch.equal(weights, same) and not torch.equal(weights, different)
    embedding = model.vision_model.embeddings.patch_embedding.weight
    assert embedding.std().item() == pytest.approx((3 * 49) ** -0.5, rel=0.05)


def test_an_expert_changes_the_vision_tower_only(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = TrainingSet.load("mini_greek", image.load_processor())
    clip_training.finetune(model, image.find_task("mini_greek"), data, TINY, 0, quiet)
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed and all(name.startswith("vision_model.") for name in changed)


def test_pretraining_changes_both_towers_and_caps_the_logit_scale(model):
    model.logit_scale.data.fill_(9.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    processor = image.load_processor()
    sets = {name: TrainingSet.load(name, processor) for name in image.ALPHABETS2}
    clip_training.pretrain(model, sets, TINY, 0, quiet)
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert {name.split(".")[0] for name in changed} >= {"vision_model", "text_model", "logit_scale"}
    assert model.logit_scale.exp().item() == pytest.approx(30.0, rel=1e-5)


def test_stages_draw_from_generators_of_their_own():
    draws = [
        torch.rand(4, generator=clip_training.stage_generator(*key)).tolist()
        for key in ((0, "a"), (0, "a"), (0, "b"), (1, "a"))
    ]
    assert draws[0] == draws[1]
    assert len({tuple(draw) for draw in draws}) == 3


def test_the_rate_warms_up_and_ends_at_zero():
    phase = Recipe().pretraining
    rates = [clip_training._rate(step, phase) for step in range(phase.steps + 1)]
    assert rates[0] == pytest.approx(1 / 50) and max(rates) == rates[50] == 1
    assert rates[-1] == pytest.approx(0, abs=1e-12)
