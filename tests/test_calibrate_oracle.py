"""Both rules give what slow, independent calibrations by whole forward passes give."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import EXACT, PAPER, PLUS, assert_same, distance, replay, run_fast, run_slow
from oracle import Knobs
from plus_slow import calibrated_plus, load
from tiny_convs import MAKES as TOWERS
from tiny_convs import net_suite, tower_suite, vector_suite
from tiny_models import (
    MAKES,
    ROUNDING,
    Suite,
    clip_suite,
    decoder_suite,
    gpt2_suite,
    parallel_suite,
    residual_suite,
    t5_suite,
    with_partial_labels,
)
from torch import Tensor, nn
from tricky_models import (
    biased,
    chain,
    few_outputs,
    gainful,
    keyword_calls,
    plain,
    stack_suite,
    used_twice,
    views,
)

from fusion_bench_featcal import Plus

TEXT = Knobs(alpha=0.15, lam=1e-3, rho=0.5, eps=1e-8)
FLAN = Knobs(alpha=0.6, lam=1e-3, norm=False)
BARE = Knobs(alpha=1.0, lam=1.0, rho=1.0, bias=False)
SMALL = Knobs(lam=1e-4, rho=1.0, alpha=0.6)
Case = tuple[Callable[[], Suite], Knobs, dict[str, Any]]


def small_clip(**shape: Any) -> Suite:
    return clip_suite(width=8, heads=2, **shape)


def wide_norms() -> Suite:
    """A CLIP whose LayerNorms have an epsilon of their own."""
    suite = clip_suite(seed=13)
    for model in (suite.merged, suite.base, *suite.experts.values()):
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 0.5
    return suite


CLIPS: list[tuple[dict[str, Any], Knobs]] = [
    ({"seed": 1}, PAPER),
    ({"seed": 2, "tasks": 1, "depth": 3, "sizes": (1, 5, 2)}, Knobs(alpha=0.0, lam=0.5, rho=0.5)),
    ({"seed": 3, "width": 8, "heads": 4, "hidden": 5}, Knobs(alpha=1.0, lam=1e-3, rho=1.0)),
    ({"seed": 4, "tasks": 5, "sizes": (6,), "depth": 1}, Knobs(alpha=0.6, lam=1e-5, rho=-0.5)),
    ({"seed": 5, "width": 4, "heads": 1}, Knobs(alpha=0.15, lam=3.0, rho=0.5, bias=False)),
    ({"seed": 6}, Knobs(alpha=0.25, rho=2.2, norm=False, eps=1e-3)),
    ({"seed": 7}, Knobs(alpha=0.25, rho=2.2, demo_last_block=True)),
    ({"seed": 8, "depth": 1, "tasks": 2}, Knobs(lam=0.01, demo_last_block=True, bias=False)),
]
T5S: list[tuple[dict[str, Any], Knobs]] = [
    ({"seed": 1, "untied": True}, PAPER),
    ({"seed": 2, "gated": False, "depths": (1, 3), "tasks": 3}, FLAN),
    ({"seed": 3, "kind": "mt5", "depths": (3, 1), "tasks": 1}, Knobs(alpha=1.0, lam=0.1, rho=0.5)),
    ({"seed": 4, "kind": "umt5"}, Knobs(alpha=0.0, lam=0.5, rho=1.0)),
]
TARGETS = {"decoder_rows": "targets"}
CASES: dict[str, Case] = {
    **{f"clip {n}": (lambda s=s: clip_suite(**s), k, {}) for n, (s, k) in enumerate(CLIPS)},
    "clip, replayed": (
        lambda: replace(s := clip_suite(), family=replay(s)), Knobs(demo_last_block=True), {}
    ),
    "clip, wide norms": (wide_norms, PAPER, {}),
    **{f"t5 {n}": (lambda s=s: t5_suite(**s), k, {}) for n, (s, k) in enumerate(T5S)},
    "t5, all of some labels": (lambda: with_partial_labels(t5_suite(seed=9)), PAPER, {}),
    "t5, targets": (lambda: with_partial_labels(t5_suite(seed=9)), PAPER, TARGETS),
    **{make: (lambda make=make: decoder_suite(make, seed=1), TEXT, {}) for make in MAKES},
    "mistral, left": (lambda: decoder_suite("mistral", side="left", seed=3), PAPER, {}),
    "qwen2, left": (lambda: decoder_suite("qwen2", side="left", seed=3), BARE, {}),
    "llama, targets": (lambda: decoder_suite(side="left", seed=3), TEXT, TARGETS),
    "qwen2, targets": (lambda: decoder_suite("qwen2", seed=3), TEXT, TARGETS),
    "gpt2": (lambda: gpt2_suite(seed=3), PAPER, {}),
    "gpt2, small lambda": (gpt2_suite, SMALL, {}),
    "residual": (lambda: residual_suite(seed=1), PAPER, {}),
    "residual, small lambda": (residual_suite, SMALL, {}),
    **{
        f"{block.__name__}, {sizes}": (
            lambda block=block, sizes=sizes: stack_suite(block, sizes=sizes, seed=1), knobs, {}
        )
        for block in (used_twice, views, keyword_calls, gainful)
        for sizes, knobs in (((5, 3), PAPER), ((2, 5, 1), Knobs(alpha=1.0, lam=1e-3, rho=0.5)))
    },
    "convolutions": (net_suite, PAPER, {}),
    "convolutions, alpha 0": (net_suite, Knobs(alpha=0.0, lam=0.5, rho=0.5, norm=False), {}),
    "convolutions, alpha 1": (net_suite, Knobs(alpha=1.0, lam=1e-3, rho=1.0), {}),
    "one dimension": (vector_suite, PAPER, {}),
    **{make: (lambda make=make: tower_suite(make), PAPER, {}) for make in TOWERS},
}  # fmt: skip
OTHER_MAKES = {m for m in MAKES if m not in ("llama", "qwen3", "gemma2", "phi3")}
"""One make of each arrangement of norms and projections runs each time."""


CONVOLUTIONS = ("convolutions", "convolutions, alpha 0", "convolutions, alpha 1", "one dimension")
NO_DRIFT = ("clip, replayed", *CONVOLUTIONS, *TOWERS)
"""Rows of convolutions are other ones, and `replay` does not know which row is read."""


def bound_of(name: str) -> float:
    """Language models round in float32, and deep sums of convolutions add up."""
    if name in TOWERS or name == "one dimension":
        return 1e-6
    return ROUNDING if name.split(",")[0].split()[0] in (*MAKES, "t5") else EXACT


def marked(names: Any) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.slow) if n in OTHER_MAKES else n for n in names]


@pytest.mark.parametrize("name", marked(CASES))
def test_paper_equals_the_oracle(name: str):
    make, knobs, settings = CASES[name]
    suite, bound = make(), bound_of(name)
    result, slow = run_fast(suite, knobs, **settings), run_slow(suite, knobs, **settings)
    assert distance(slow.model, suite.merged) > 1e-3
    assert_same(result.model, slow.model, bound)
    for buffer, value in slow.model.named_buffers():
        torch.testing.assert_close(result.model.get_buffer(buffer), value, rtol=1e-6, atol=1e-8)
    keys = ["drift_before", "relative_drift_before", "drift_after", "relative_drift_after"]
    for record in result.log.of_kind("task") if name not in NO_DRIFT else []:
        drift = slow.drift[record["block"], record["task"]]
        assert [record[key] for key in keys] == pytest.approx(drift, rel=1e-5)


@pytest.mark.parametrize("knobs", [Knobs(rho=1.0), Knobs(rho=1.0, alpha=1.0, lam=1.0)], ids=str)
def test_at_rho_1_no_base_is_needed(knobs: Knobs):
    suite = clip_suite(seed=9)
    found = run_fast(suite, knobs, has_base=False).model
    assert_same(found, run_fast(suite, knobs).model, 0)
    assert_same(found, run_slow(suite, knobs, has_base=False).model)


FLOAT32_BOUND, BFLOAT16_BOUND, FLOAT16_BOUND = 2e-5, 1e-2, 1.5e-3


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, FLOAT32_BOUND), (torch.bfloat16, BFLOAT16_BOUND),
     (torch.float16, FLOAT16_BOUND)],
)  # fmt: skip
def test_narrow_models_stay_near_the_float64_oracle(dtype: torch.dtype, bound: float):
    for number in range(3) if dtype is torch.float32 else [0]:
        make, knobs, _ = CASES[f"clip {number}"]
        suite = make().to(dtype)
        wanted = run_slow(suite, knobs).model
        assert_same(run_fast(suite, knobs).model, wanted, bound)
        assert distance(wanted, suite.merged) > 3 * bound


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


PLUS_SUITES: dict[str, Callable[[], Suite]] = {
    "clip": clip_suite,
    "t5": t5_suite,
    "llama": decoder_suite,
    "gpt2": gpt2_suite,
    "residual": residual_suite,
    "clip, replayed": lambda: replace(
        s := small_clip(tasks=2, sizes=(4, 1), seed=4), family=replay(s)
    ),
    "clip, 1 task": lambda: small_clip(tasks=1, sizes=(5, 4), hidden=10, seed=5),
    "clip, 1 sample": lambda: small_clip(tasks=2, sizes=(1,), seed=3),
    "residual, 1 task": lambda: residual_suite(tasks=1, sizes=(25, 16), seed=3),
    "residual, 2 samples": lambda: residual_suite(sizes=(1, 1), tasks=3, seed=2),
    "many samples": lambda: residual_suite(sizes=(60, 40)),
    **{
        make: lambda make=make, seed=seed: decoder_suite(make, seed=seed)
        for seed, make in enumerate(("gemma2", "granite", "olmo2", "phi3", "starcoder2"), 2)
    },
    "qwen2, left": lambda: decoder_suite("qwen2", side="left", seed=2),
    **{
        make: lambda make=make, seed=seed: parallel_suite(make, seed=seed)
        for seed, make in enumerate(("gpt_neox", "cohere", "phi"), 1)
    },
    "t5, ungated": lambda: t5_suite(seed=2, gated=False, depths=(1, 1)),
    **{
        block.__name__: lambda block=block: stack_suite(block, sizes=(5, 2), seed=1)
        for block in (used_twice, keyword_calls, chain, few_outputs, biased, plain)
    },
}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "samples alone": ("clip", {"gamma": 0.0}, {"gamma": 0.0}),
    "much of the weights": ("clip", {"gamma": 24.0}, {"gamma": 24.0}),
    "no biases": ("clip", {"biases": False}, {"calibrate_bias": False}),
    "factors": ("clip", {"factors": {"task_0": 4.0}}, {"task_weights": {"task_0": 4.0}}),
    "targets": ("llama", {"decoder_rows": "targets"}, {}),
}
"""A suite, arguments of the oracle, and fields of the rule."""


@pytest.fixture
def doubles_stay_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rotary angles and softmax of language models in float64, not in float32."""

    class Wide:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    for name, module in list(sys.modules.items()):
        is_torch = getattr(module, "torch", None) is torch
        if name.startswith("transformers.models.") and ".modeling_" in name and is_torch:
            monkeypatch.setattr(module, "torch", Wide())
    monkeypatch.setattr(Tensor, "float", Tensor.double)


@pytest.mark.usefixtures("doubles_stay_doubles")
@pytest.mark.parametrize(
    ("name", "knobs", "fields"),
    [*((name, {}, {}) for name in PLUS_SUITES), *VARIANTS.values()],
    ids=[*PLUS_SUITES, *VARIANTS],
)
def test_plus_equals_the_oracle(name: str, knobs: dict[str, Any], fields: dict[str, Any]):
    suite = PLUS_SUITES[name]()
    new = calibrated_plus(suite, **knobs)
    rows = knobs.get("decoder_rows", "all")
    found = run_fast(suite, **PLUS | {"rule": Plus(**fields), "decoder_rows": rows}).model
    moved = {n for n, p in found.named_parameters()
             if not torch.equal(p, suite.merged.get_parameter(n))}  # fmt: skip
    assert moved and moved <= set(new)
    load(suite.merged, new)
    assert_same(found, suite.merged, EXACT)


@pytest.mark.parametrize("settings", [{}, PLUS | {"rule": Plus(gamma=0.0)}], ids=["paper", "plus"])
def test_biases_make_up_for_the_rounding_of_weights(settings: dict[str, Any]):
    suite = stack_suite(biased, tasks=1, sizes=(30,), seed=2).to(torch.bfloat16)
    for model in (suite.merged, *suite.experts.values()):
        with torch.no_grad():  # large means of few values show what the weight's rounding costs
            model.get_parameter("embed.bias").fill_(10.0)
    found, expert = (
        m.get_submodule("layers.0.only").double()
        for m in (run_fast(suite, Knobs(alpha=1.0, lam=1e-6), **settings).model,
                  suite.experts["task_0"])
    )  # fmt: skip
    batch = suite.inputs["task_0"][0].bfloat16()
    ours, theirs = (
        m.get_submodule("embed")(batch).double().mean(0)
        for m in (suite.merged, suite.experts["task_0"])
    )
    wanted: Tensor = expert(theirs)
    size = found.get_parameter("bias").abs()
    assert ((found(ours) - wanted).abs() <= size * 2**-8 + 1e-3).all()
