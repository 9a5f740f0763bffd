"""The fast calibration equals a slow replay of whole forward passes, block by block."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calibrations import (
    EXACT,
    PAPER,
    assert_identical,
    assert_same,
    distance,
    run_fast,
    run_slow,
)
from oracle import Knobs
from tiny_models import Suite, batched, clip_suite, gpt2_suite, residual_suite, t5_suite
from torch import nn
from tricky_models import (
    gainful,
    in_place_residual,
    keyword_calls,
    same_tensor_changed,
    shares_sometimes,
    stack_suite,
    used_twice,
    views,
)

from fusion_bench_featcal import CalibrationError

FLOAT32_BOUND = 2e-5  # float32 models, against the float64 oracle on the same weights

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


def test_a_layer_norms_own_epsilon_counts():
    suite = clip_suite(seed=13)
    for model in (suite.merged, suite.base, *suite.experts.values()):
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 0.5
    assert_same(run_fast(suite).model, run_slow(suite).model)


@pytest.mark.parametrize(
    "make",
    [
        lambda: residual_suite(seed=1),  # on plain tensors
        lambda: gpt2_suite(seed=3),  # with padding
        *(
            lambda block=block, sizes=sizes: stack_suite(block, sizes=sizes, seed=1)
            for block in (used_twice, views, keyword_calls, gainful)
            for sizes in ((5, 3), (2, 5, 1))
        ),
    ],
)
@pytest.mark.parametrize("knobs", [PAPER, Knobs(alpha=1.0, lam=1e-3, rho=0.5)], ids=str)
def test_replayed_models_equal_the_oracle(make: Callable[[], Suite], knobs: Knobs):
    suite = make()
    assert_same(run_fast(suite, knobs).model, run_slow(suite, knobs).model)


@pytest.mark.parametrize("knobs", [Knobs(rho=1.0), Knobs(rho=1.0, alpha=1.0, lam=1.0)], ids=str)
def test_at_rho_1_a_base_changes_nothing(knobs: Knobs):
    suite = clip_suite(seed=9)
    found = run_fast(suite, knobs, has_base=False).model
    assert_identical(found, run_fast(suite, knobs).model)
    assert_same(found, run_slow(suite, knobs).model)


@pytest.mark.parametrize(
    ("suite", "bound"),
    [(clip_suite(seed=10), EXACT), (gpt2_suite(seed=4), EXACT), (t5_suite(seed=1), 1e-5)],
)
def test_drift_in_the_log_is_that_of_the_oracle(suite: Suite, bound: float):
    found = {(r["block"], r["task"]): r for r in run_fast(suite).log.of_kind("task")}
    wanted = run_slow(suite).drift
    assert set(found) == set(wanted)
    names = ["drift_before", "relative_drift_before", "drift_after", "relative_drift_after"]
    for place, drift in wanted.items():
        assert [found[place][name] for name in names] == pytest.approx(drift, rel=bound)


CHANGES: list[dict[str, Any]] = [
    {"alpha": 0.31}, {"lam": 0.051}, {"rho": 2.01}, {"bias": False}, {"norm": False},
    {"demo_last_block": True}, {"eps": 1e-5},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_comparison_notices_another_setting(change: dict[str, Any]):
    suite = clip_suite(seed=11)
    wanted = run_slow(suite, Knobs(**change)).model
    with pytest.raises(AssertionError, match="relative distance"):
        assert_same(run_fast(suite, Knobs()).model, wanted, 1e-6)


@pytest.mark.parametrize(
    "sizes", [{"task_1": (2, 5)}, {"task_0": (5, 2)}, {"task_1": (2, 2, 2, 1)}], ids=str
)
def test_inputs_that_are_shared_sometimes_are_refused(sizes: dict[str, tuple[int, ...]]):
    suite = stack_suite(shares_sometimes, sizes=(7,), seed=2)
    for task, parts in sizes.items():
        suite.inputs[task] = batched(torch.cat(suite.inputs[task]), parts)
    (wrong,) = sizes
    message = rf"task {wrong}, block .*first.*method\.modules=\['!"
    with pytest.raises(CalibrationError, match=message):
        run_fast(suite, PAPER)


@pytest.mark.parametrize("block", [in_place_residual, same_tensor_changed])
def test_blocks_that_overwrite_an_input_are_refused(block: type[nn.Module]):
    suite = stack_suite(block, sizes=(5, 3), seed=1)
    with pytest.raises(
        CalibrationError, match=r"module .*first: .*overwrites its input.*method\.modules=\['!"
    ):
        run_fast(suite, PAPER)
