"""The fast calibration equals a slow replay of whole forward passes, block by block."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from oracle import Knobs, Outcome, calibrate_slowly
from tiny_models import Suite, clip_suite, gpt2_suite, modules_of, residual_suite
from torch import Tensor, nn
from tricky_models import (
    Gainful,
    InPlaceResidual,
    KeywordCalls,
    SameTensorChanged,
    SharesSometimes,
    UsedTwice,
    Views,
    stack_suite,
)

from fusion_bench_featcal import CalibrationResult, FeatCalSettings, calibrate

EXACT = 1e-9  # float64, relative to each parameter's norm
FLOAT32_BOUND = 2e-5  # float32 models, against the float64 oracle on the same weights
PAPER = Knobs(eps=1e-8)


def samples_in(suite: Suite) -> int:
    batches = next(iter(suite.inputs.values()))
    return sum(
        len(batch if isinstance(batch, Tensor) else next(iter(batch.values()))) for batch in batches
    )


def settings_of(knobs: Knobs, suite: Suite, **more: Any) -> FeatCalSettings:
    values = {
        "ridge_lambda": knobs.lam,
        "mix_alpha": knobs.alpha,
        "anchor_rho": knobs.rho,
        "eps": knobs.eps,
        "calibrate_bias": knobs.bias,
        "calibrate_norm": knobs.norm,
        "token_weights": "demo_last_block" if knobs.demo_last_block else "uniform",
        "samples_per_task": samples_in(suite),
    }
    return FeatCalSettings(**(values | more))


def cast(inputs: Mapping[str, list], dtype: torch.dtype) -> dict[str, list]:
    def one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return {
        task: [
            {k: one(v) for k, v in batch.items()} if isinstance(batch, Mapping) else one(batch)
            for batch in batches
        ]
        for task, batches in inputs.items()
    }


def run_fast(
    suite: Suite, knobs: Knobs = PAPER, family: Any = "auto", has_base: bool = True, **more: Any
) -> CalibrationResult:
    dtype = next(suite.merged.parameters()).dtype
    return calibrate(
        suite.merged,
        suite.base if has_base else None,
        suite.experts,
        cast(suite.inputs, dtype),
        settings_of(knobs, suite, **more),
        family=family,
        progress=False,
    )


def run_slow(suite: Suite, knobs: Knobs = PAPER, has_base: bool = True) -> Outcome:
    masks = None
    first = next(iter(suite.inputs.values()))[0]
    if isinstance(first, Mapping) and "attention_mask" in first:
        masks = {t: [b["attention_mask"] for b in batches] for t, batches in suite.inputs.items()}
    return calibrate_slowly(
        suite.merged,
        suite.base if has_base else None,
        suite.experts,
        suite.inputs,
        suite.blocks,
        modules_of(suite.merged, suite.blocks),
        knobs,
        masks,
    )


def replay(suite: Suite) -> dict[str, Any]:
    return {"name": "replay", "blocks": suite.blocks}


def distance(found: nn.Module, wanted: nn.Module) -> float:
    """Largest relative distance of a parameter."""
    theirs = {name: value.detach().double() for name, value in wanted.named_parameters()}
    ours = {name: value.detach().double() for name, value in found.named_parameters()}
    assert list(ours) == list(theirs)
    return max(float((ours[name] - their).norm() / their.norm()) for name, their in theirs.items())


def assert_same(found: nn.Module, wanted: nn.Module, bound: float = EXACT) -> None:
    gap = distance(found, wanted)
    assert gap <= bound, f"relative distance {gap:.2e} exceeds {bound:.0e}"


CLIP_CASES = [
    ({"seed": 1}, PAPER),
    ({"seed": 2, "tasks": 1, "depth": 3, "sizes": (1, 5, 2)}, Knobs(alpha=0.0, lam=0.5, rho=0.5)),
    ({"seed": 3, "width": 8, "heads": 4, "hidden": 5}, Knobs(alpha=1.0, lam=1e-3, rho=1.0)),
    ({"seed": 4, "tasks": 5, "sizes": (6,), "depth": 1}, Knobs(alpha=0.6, lam=1e-5, rho=-0.5)),
    ({"seed": 5, "width": 4, "heads": 1}, Knobs(alpha=0.15, lam=3.0, rho=0.5, bias=False)),
    ({"seed": 6}, Knobs(alpha=0.25, rho=2.2, norm=False, eps=1e-3)),
    ({"seed": 7}, Knobs(alpha=0.25, rho=2.2, demo_last_block=True)),
    ({"seed": 8, "depth": 1, "tasks": 2}, Knobs(lam=0.01, demo_last_block=True, bias=False)),
]


@pytest.mark.parametrize(("shape", "knobs"), CLIP_CASES, ids=lambda value: str(value)[-40:])
def test_clip_equals_the_oracle(shape: dict[str, Any], knobs: Knobs):
    suite = clip_suite(**shape)
    wanted = run_slow(suite, knobs)
    assert distance(wanted.model, suite.merged) > 1e-3
    assert_same(run_fast(suite, knobs).model, wanted.model)


@pytest.mark.parametrize(("shape", "knobs"), CLIP_CASES[:3], ids=lambda value: str(value)[-40:])
def test_float32_clip_stays_within_its_bound_of_the_oracle(shape: dict[str, Any], knobs: Knobs):
    suite = clip_suite(**shape).to(torch.float32)
    assert_same(run_fast(suite, knobs).model, run_slow(suite, knobs).model, FLOAT32_BOUND)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("knobs", [PAPER, Knobs(alpha=1.0, lam=1e-3, rho=0.5)], ids=str)
def test_residual_network_on_plain_tensors_equals_the_oracle(seed: int, knobs: Knobs):
    suite = residual_suite(seed=seed)
    found = run_fast(suite, knobs, {"name": "replay", "blocks": ["layers.*"]})
    assert_same(found.model, run_slow(suite, knobs).model)


@pytest.mark.parametrize("knobs", [PAPER, Knobs(alpha=1.0, lam=1e-3, rho=0.5)], ids=str)
def test_gpt2_with_padding_equals_the_oracle(knobs: Knobs):
    suite = gpt2_suite(seed=3)
    found = run_fast(suite, knobs, replay(suite))
    assert_same(found.model, run_slow(suite, knobs).model)


@pytest.mark.parametrize("knobs", [Knobs(rho=1.0), Knobs(rho=1.0, alpha=1.0, lam=1.0)], ids=str)
def test_missing_base_equals_the_oracle(knobs: Knobs):
    suite = clip_suite(seed=9)
    wanted = run_slow(suite, knobs, has_base=False)
    assert_same(run_fast(suite, knobs, has_base=False).model, wanted.model)
    # lambda is dropped for biases and norms, so this is not the anchor at the merged model
    assert distance(wanted.model, run_slow(suite, knobs).model) > 1e-4


def test_drift_in_the_log_is_that_of_the_oracle():
    for suite, family in ((clip_suite(seed=10), "auto"), (gpt2_suite(seed=4), None)):
        log = run_fast(suite, family=family or replay(suite)).log
        wanted = run_slow(suite).drift
        found = {(r["block"], r["task"]): r for r in log.records if r["kind"] == "task"}
        assert set(found) == set(wanted)
        names = ["drift_before", "relative_drift_before", "drift_after", "relative_drift_after"]
        for place, drift in wanted.items():
            for name, value in zip(names, drift, strict=True):
                assert found[place][name] == pytest.approx(value, rel=EXACT)


@pytest.mark.parametrize(
    "change",
    [
        {"alpha": 0.31},
        {"lam": 0.051},
        {"rho": 2.01},
        {"bias": False},
        {"norm": False},
        {"demo_last_block": True},
        {"eps": 1e-5},
    ],
    ids=str,
)
def test_comparison_notices_another_setting(change: dict[str, Any]):
    suite = clip_suite(seed=11)
    wanted = run_slow(suite, Knobs(**change)).model
    with pytest.raises(AssertionError, match="relative distance"):
        assert_same(run_fast(suite, Knobs()).model, wanted, 1e-6)


def test_comparison_notices_a_swapped_expert_and_another_order_of_blocks():
    suite = clip_suite(seed=12)
    found = run_fast(suite).model
    swapped = copy.copy(suite)
    names = list(suite.experts)
    swapped.experts = dict(zip(names, reversed(suite.experts.values()), strict=True))
    backwards = copy.copy(suite)
    backwards.blocks = suite.blocks[::-1]
    for wrong in (swapped, backwards):
        with pytest.raises(AssertionError, match="relative distance"):
            assert_same(found, run_slow(wrong).model, 1e-6)


TRICKY = [
    InPlaceResidual,
    SameTensorChanged,
    UsedTwice,
    SharesSometimes,
    Views,
    KeywordCalls,
    Gainful,
]


@pytest.mark.parametrize("block", TRICKY, ids=lambda block: block.__name__)
@pytest.mark.parametrize("sizes", [(5, 3), (2, 5, 1)], ids=str)
def test_tricky_blocks_equal_the_oracle(block: type[nn.Module], sizes: tuple[int, ...]):
    suite = stack_suite(block, sizes=sizes, seed=1)
    assert_same(run_fast(suite, PAPER, replay(suite)).model, run_slow(suite).model)
