"""open_clip's models, and FusionBench's wrappers of them, calibrate as the rebuilt tower does."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from calibrations import assert_same, distance, run_fast
from tiny_models import Suite, normal
from tiny_open_clip import FEATURES, tower_suite
from torch import nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import OPEN_CLIP, resolve_family
from fusion_bench_featcal.families.open_clip import split

open_clip = pytest.importorskip("open_clip", reason="not installed: nox -s openclip")
wrappers = pytest.importorskip("fusion_bench.models.open_clip")
pytestmark = pytest.mark.openclip

VISION = {"layers": 2, "width": 12, "head_width": 4, "patch_size": 4, "image_size": 8}
TEXT = {"context_length": 5, "vocab_size": 20, "width": 8, "heads": 2, "layers": 1}


def real_tower(model: nn.Module, *, quick: bool, batch_first: bool) -> nn.Module:
    """The same weights in open_clip's class."""
    tower = open_clip.transformer.VisionTransformer(
        image_size=8,
        patch_size=4,
        width=12,
        layers=2,
        heads=3,
        mlp_ratio=20 / 12,
        output_dim=FEATURES,
        act_layer=open_clip.transformer.QuickGELU if quick else nn.GELU,
    )
    if not batch_first:
        tower.transformer.batch_first = False
        for block in tower.transformer.resblocks:
            block.attn.batch_first = False
    tower.double().load_state_dict(model.state_dict())
    return tower.eval()


def classifier_of(tower: nn.Module) -> nn.Module:
    """FusionBench's wrappers. The constructor of the encoder would download weights."""
    encoder: Any = wrappers.ImageEncoder.__new__(wrappers.ImageEncoder)
    nn.Module.__init__(encoder)
    encoder.model = open_clip.CLIP(FEATURES, VISION, TEXT, quick_gelu=True)
    encoder.model.visual = tower
    del encoder.model.transformer
    encoder.train_preprocess = encoder.val_preprocess = None
    head = wrappers.ClassificationHead(True, normal(0, 4, FEATURES))
    return wrappers.ImageClassifier(encoder, head).double().eval()


def real_suite(suite: Suite, convert: Any) -> Suite:
    experts = {task: convert(expert) for task, expert in suite.experts.items()}
    return Suite(convert(suite.merged), convert(suite.base), experts, suite.inputs, [])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("quick", [True, False])
def test_vision_transformer_calibrates_as_the_rebuilt_tower(quick: bool, batch_first: bool):
    suite = tower_suite(seed=1, quick=quick)
    convert = partial(real_tower, quick=quick, batch_first=batch_first)
    real = real_suite(suite, convert)
    assert resolve_family("auto", real.merged) is OPEN_CLIP
    pixels = normal(0, 3, 3, 8, 8)
    torch.testing.assert_close(real.merged(pixels), suite.merged(pixels))
    calibrated, expected = run_fast(real).model, run_fast(suite).model
    assert distance(calibrated, real.merged) > 1e-3
    assert {n for n, _ in calibrated.named_parameters()} == {
        n for n, _ in expected.named_parameters()
    }
    assert_same(convert(expected), calibrated)
    assert str(calibrated) == str(real.merged)


def test_fusion_benchs_classifier_calibrates_as_the_tower_alone():
    suite = real_suite(tower_suite(seed=2), partial(real_tower, quick=True, batch_first=True))
    outer = real_suite(suite, classifier_of)
    before = copy.deepcopy(outer.merged.state_dict())
    calibrated = run_fast(outer).model
    assert_same(calibrated.get_submodule("image_encoder.model.visual"), run_fast(suite).model)
    head = [name for name in before if name.startswith("classification_head")]
    assert all(torch.equal(calibrated.state_dict()[name], before[name]) for name in head)
    assert str(calibrated) == str(outer.merged)


def test_custom_attention_is_refused_by_name():
    tower = open_clip.transformer.VisionTransformer(8, 4, 12, 2, 3, 2.0, output_dim=4, qk_norm=True)
    with pytest.raises(CalibrationError, match=r"resblocks\.0\.attn is a Attention"):
        split(tower)
