"""Modules that can be calibrated are; others are refused by name, never skipped silently."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calibrations import run_fast
from tiny_models import Suite, clip_suite
from torch import nn
from tricky_models import fused_attention, gainful, mixture, stack_suite, transposed_convolution

from fusion_bench_featcal import CalibrationError

UNFIT = [
    (fused_attention, "attention", "MultiheadAttention", "in_proj_weight"),
    (mixture, "experts", "ParameterDict", "stacked"),
    (transposed_convolution, "filter", "ConvTranspose2d", "weight"),
]


@pytest.mark.parametrize(("block", "name", "kind", "leaf"), UNFIT)
def test_linear_like_modules_are_refused_by_name_and_never_skipped(
    block: Callable[[], nn.Module], name: str, kind: str, leaf: str
):
    suite = stack_suite(block)
    with pytest.raises(
        CalibrationError,
        match=rf"block layers\.0: module layers\.0\.{name} .*{kind}.*{leaf}.*method\.modules",
    ):
        run_fast(suite)
    # excluded by hand they stay as merged, and the rest is calibrated
    excluded = [f"!{name}", f"!{name}.*"] if block is fused_attention else [f"!{name}"]
    only = {name for name, _ in suite.merged.named_parameters() if ".only." in name}
    assert moved_parameters(suite, modules=excluded) == only


def moved_parameters(suite: Suite, **settings: Any) -> set[str]:
    found = run_fast(suite, **settings).model
    merged = suite.merged.named_parameters()
    return {name for name, value in merged if not torch.equal(found.get_parameter(name), value)}


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"calibrate_bias": False}, ["q_proj.bias", "fc2.bias"]),
        ({"calibrate_norm": False}, ["layer_norm1.weight", "layer_norm2.bias"]),
        ({"modules": ["!mlp.fc1"]}, ["fc1.weight", "fc1.bias"]),
        ({}, ["embedding", "post_layernorm", "pre_layrnorm"]),
    ],
    ids=str,
)
def test_what_is_not_calibrated_keeps_its_bits(change: dict[str, Any], kept: list[str]):
    suite = clip_suite(seed=12)
    moved = moved_parameters(suite, **change)
    assert any("out_proj.weight" in name for name in moved)
    for part in kept:
        assert any(part in name for name, _ in suite.merged.named_parameters())
        assert not any(part in name for name in moved), part


def test_patterns_take_modules_in_and_out():
    moved = moved_parameters(clip_suite(seed=12), modules=["*.fc2", "!*.0.mlp.fc2"])
    ends = {name.rpartition("layers.")[2] for name in moved}
    assert ends == {"1.mlp.fc2.weight", "1.mlp.fc2.bias"}


def test_norm_without_shift_and_embeddings_stay_and_are_logged():
    suite = stack_suite(gainful)
    result = run_fast(suite)
    for name in ("norm.weight", "place.weight"):
        full = f"layers.0.{name}"
        assert torch.equal(result.model.get_parameter(full), suite.merged.get_parameter(full))
    block = next(r for r in result.log.records if r["kind"] == "block")
    assert {"layers.0.norm", "layers.0.place"} <= set(block["left"])
