"""open_clip's fused attention taken apart, calibrated, and put together again."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PAPER, PLUS, assert_identical, assert_same, distance, run_fast
from oracle import Knobs
from safetensors.torch import save_file
from tiny_models import Suite, clip_suite, normal
from tiny_open_clip import ImageEncoder, Tower, TwoTowers, converted, tower_suite
from torch import nn

from fusion_bench_featcal import CalibrationError, SafetensorsExpert
from fusion_bench_featcal.families import OPEN_CLIP, resolve_family

BLOCKS = ["transformer.resblocks.0", "transformer.resblocks.1"]
VIEW = OPEN_CLIP.view


def twins(seed: int, *, batch_first: bool = True) -> tuple[Suite, Suite]:
    """One suite as transformers has it and, converted, as open_clip has it."""
    ours = clip_suite(seed=seed)
    theirs = Suite(
        converted(ours.merged, batch_first=batch_first),
        converted(ours.base, batch_first=batch_first),
        {t: converted(expert, batch_first=batch_first) for t, expert in ours.experts.items()},
        ours.inputs,
        BLOCKS,
    )
    return ours, theirs


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("quick", [True, False])
def test_shown_model_is_the_same_function(quick: bool, batch_first: bool):
    model = tower_suite(seed=1, quick=quick, batch_first=batch_first).merged
    pixels = normal(0, 3, 3, 8, 8)
    shown = VIEW.shown(model)
    torch.testing.assert_close(shown(pixels), model(pixels))
    assert not any(isinstance(module, nn.MultiheadAttention) for module in shown.modules())
    restored = VIEW.restored(copy.deepcopy(shown))
    assert_identical(restored, model)
    assert torch.equal(restored(pixels), model(pixels))
    assert str(restored) == str(model)
    assert list(restored.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("prefix", ["", "visual."])
def test_experts_stream_from_files_as_open_clip_writes_them(tmp_path: Path, prefix: str):
    suite = tower_suite(seed=12)
    sources = {}
    for task, expert in suite.experts.items():
        tensors = {f"{prefix}{name}": tensor for name, tensor in expert.state_dict().items()}
        save_file(tensors, tmp_path / f"{task}.safetensors")
        sources[task] = SafetensorsExpert(tmp_path / f"{task}.safetensors")
    found = run_fast(replace(suite, experts=sources))
    assert_identical(found.model, run_fast(suite).model)
    read = {r["expert_bytes"] for r in found.log.records if r["kind"] == "task"}
    block = suite.base.get_submodule(BLOCKS[0])
    assert read == {sum(p.numel() * 8 for p in block.parameters())}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "knobs",
    [PAPER, Knobs(alpha=1.0, lam=1e-3, rho=2.2, demo_last_block=True)],
    ids=["paper", "demo weights"],
)
def test_open_clip_calibrates_and_drifts_as_its_transformers_twin(knobs: Knobs, batch_first: bool):
    ours, theirs = twins(4, batch_first=batch_first)
    wanted, found = run_fast(ours, knobs), run_fast(theirs, knobs)
    assert distance(found.model, theirs.merged) > 1e-3
    assert_same(found.model, converted(wanted.model, batch_first=batch_first))
    assert type(found.model) is Tower and str(found.model) == str(theirs.merged)
    visits = [result.log.of_kind("task") for result in (found, wanted)]
    for ours_, theirs_ in zip(*visits, strict=True):
        assert (ours_["task"], ours_["rows"]) == (theirs_["task"], theirs_["rows"])
        for name in ("drift_before", "drift_after"):
            assert ours_[name] == pytest.approx(theirs_[name], rel=1e-9)


@pytest.mark.parametrize("batch_first", [True, False])
def test_plus_reads_the_class_token_as_of_its_transformers_twin(batch_first: bool):
    ours, theirs = twins(4, batch_first=batch_first)
    wanted, found = (run_fast(suite, **PLUS).model for suite in (ours, theirs))
    assert_same(found, converted(wanted, batch_first=batch_first))


def wrapped(suite: Suite, wrap: type[nn.Module]) -> Suite:
    torch.manual_seed(0)
    extra = wrap(nn.Identity())

    def one(model: nn.Module) -> nn.Module:
        outer = copy.deepcopy(extra)
        setattr(outer, "visual" if wrap is TwoTowers else "model", model)
        return outer.double().eval()

    experts = {task: one(expert) for task, expert in suite.experts.items()}
    return Suite(one(suite.merged), one(suite.base), experts, suite.inputs, [])


def test_wrappers_calibrate_as_the_tower_alone_and_the_text_tower_stays():
    suite = tower_suite(seed=7)
    wanted = run_fast(suite).model
    clip = wrapped(suite, TwoTowers)
    encoder = wrapped(clip, ImageEncoder)
    text = copy.deepcopy(clip.merged.get_submodule("transformer"))
    for outer, prefix in ((clip, "visual"), (encoder, "model.visual")):
        found = run_fast(outer).model
        assert resolve_family("auto", outer.merged) is OPEN_CLIP
        assert_same(found.get_submodule(prefix), wanted)
        inner = prefix.removesuffix("visual") + "transformer"
        assert_identical(found.get_submodule(inner), text)
        assert str(found) == str(outer.merged)


class Odd(nn.MultiheadAttention):
    """Attention with something more to it."""


def with_attention(attention: nn.Module) -> nn.Module:
    model = Tower()
    model.transformer.resblocks[1].attn = attention
    return model


def without_switch() -> nn.Module:
    model = Tower(batch_first=False)
    del model.transformer.batch_first
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (
                lambda a=a: VIEW.shown(with_attention(a)),
                r"resblocks\.1\.attn is a .*replay.*modules",
            )
            for a in (
                Odd(12, 3, batch_first=True),
                nn.MultiheadAttention(12, 3, kdim=5, batch_first=True),
                nn.MultiheadAttention(12, 3, add_bias_kv=True, batch_first=True),
                nn.MultiheadAttention(12, 3, add_zero_attn=True, batch_first=True),
                nn.Linear(12, 12),
            )
        ),
        (
            lambda: VIEW.shown(without_switch()),
            r"batch in second place.*open_clip_torch 2\.26",
        ),
        (lambda: OPEN_CLIP.stages(nn.Linear(2, 2)), r"Linear has no open_clip vision transformer"),
        (lambda: OPEN_CLIP.stages(TwoTowers(nn.Identity())), "no open_clip vision transformer"),
        (
            lambda: resolve_family("auto", TwoTowers(nn.Identity())),
            r"family=auto does not know TwoTowers.*open_clip",
        ),
    ],
)
def test_what_is_no_open_clip_is_refused(call: Any, message: str):
    with pytest.raises((CalibrationError, ValueError), match=message):
        call()
