"""FeatCal+ equals a slow replay of whole forward passes, group by group."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import EXACT, assert_same, distance, samples_in
from oracle import record
from plus_oracle import calibrated_plus, load
from plus_rows import Seen, is_linear, stream, writers_of
from tiny_models import (
    VOCABULARY,
    Suite,
    add_up,
    clip_suite,
    decoder_suite,
    gpt2_suite,
    modules_of,
    replayed,
    residual_suite,
    sentences,
    t5_suite,
    without_labels,
)
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from tricky_models import biased, chain, keyword_calls, plain, stack_suite, used_twice

from fusion_bench_featcal import CalibrationResult, FeatCalSettings, calibrate

PLUS: dict[str, Any] = {"order": "module", "target": "residual", "ridge": "kfold", "stages": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "plus": {},
    "stages=1": {"stages": 1},
    "target=module": {"target": "module"},
    "order=block": {"order": "block"},
    "ridge=fixed": {"ridge": "fixed", "stages": 1},
    "calibrate_bias=False": {"calibrate_bias": False},
    "first_ridge_scale=0.1": {"first_ridge_scale": 0.1},
    "task_weights": {"task_weights": {"task_0": 4.0}},
    "anchor_rho=1": {"anchor_rho": 1.0},
    "anchor_rho=3.5": {"anchor_rho": 3.5},
}


# One arrangement is enough for these.
FACTORS = ("first_ridge_scale=0.1", "task_weights", "anchor_rho=1", "anchor_rho=3.5")


def parallel_suite(make: str, *, seed: int, **shape: Any) -> Suite:
    """Decoders without a family of their own, most of them with parallel branches."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | shape
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(make, **shape)).eval()
    inputs: dict[str, list] = {
        f"task_{index}": [
            without_labels(sentences(part, max(part) + 1, seed=seed + 10 * index + i))
            for i, part in enumerate([[5, 2, 4], [3, 6, 4 + index]])
        ]
        for index in range(2)
    }
    inner = "gpt_neox" if make == "gpt_neox" else "model"
    return replayed(model, inputs, [f"{inner}.layers.{index}" for index in range(2)], seed)


def as_replay(suite: Suite) -> Suite:
    """A suite that is calibrated by the family that knows nothing of the model."""
    return replace(suite, family={"name": "replay", "blocks": suite.blocks})


def merged_by(scale: float, suite: Suite) -> Suite:
    """A suite whose merged model has so much of the sum of the experts' steps."""
    return replace(suite, merged=add_up(suite.base, suite.experts, scale))


SUITES: dict[str, Callable[[], Suite]] = {
    "clip": lambda: clip_suite(tasks=2, sizes=(4, 3), seed=1),
    "clip, long step": lambda: merged_by(0.7, clip_suite(tasks=2, sizes=(4, 3), seed=6)),
    "clip, too long": lambda: merged_by(2.0, clip_suite(tasks=2, sizes=(4, 3), seed=7)),
    "clip, 3 tasks": lambda: clip_suite(tasks=3, sizes=(2, 1, 3), width=8, heads=2, seed=2),
    "clip, replayed": lambda: as_replay(clip_suite(tasks=2, sizes=(4, 1), seed=4)),
    "clip, 1 task": lambda: clip_suite(tasks=1, sizes=(5, 4), width=8, heads=2, hidden=10, seed=5),
    "clip, 1 sample": lambda: clip_suite(tasks=2, sizes=(1,), seed=3),
    "residual": lambda: residual_suite(sizes=(5, 4), seed=1),
    "residual, 1 task": lambda: residual_suite(tasks=1, sizes=(25, 16), seed=3),
    "residual, 2 samples": lambda: residual_suite(sizes=(1, 1), tasks=3, seed=2),
    "gpt2": lambda: gpt2_suite(seed=3),
    "llama": lambda: decoder_suite("llama", seed=1),
    "qwen2, left": lambda: decoder_suite("qwen2", side="left", seed=2),
    "gemma2": lambda: decoder_suite("gemma2", seed=3),
    "olmo2": lambda: decoder_suite("olmo2", seed=4),
    "granite": lambda: decoder_suite("granite", seed=5),
    "starcoder2": lambda: decoder_suite("starcoder2", tasks=1, seed=6),
    "phi3": lambda: decoder_suite("phi3", seed=7),
    "gpt_neox": lambda: parallel_suite("gpt_neox", seed=1),
    "gpt_neox, serial": lambda: parallel_suite("gpt_neox", seed=2, use_parallel_residual=False),
    "cohere": lambda: parallel_suite("cohere", seed=3),
    "phi": lambda: parallel_suite("phi", seed=4),
    "t5": lambda: t5_suite(seed=1),
    "t5, ungated": lambda: t5_suite(seed=2, gated=False, depths=(1, 1)),
    "used twice": lambda: stack_suite(used_twice, sizes=(5, 2), seed=1),
    "keyword calls": lambda: stack_suite(keyword_calls, sizes=(5, 2), seed=1),
    "chain": lambda: stack_suite(chain, sizes=(5, 2), seed=1),
    "one map": lambda: stack_suite(biased, sizes=(5, 2), seed=1),
    "one map, 1 task": lambda: stack_suite(biased, tasks=1, sizes=(20, 17), seed=3),
    "one map, no bias": lambda: stack_suite(plain, sizes=(5, 2), seed=1),
}
NO_WRITERS = {
    "residual",
    "residual, 1 task",
    "residual, 2 samples",
    "gemma2",
    "olmo2",
    "granite",
    "used twice",
    "chain",
}
# These run with every part left out each time, and one of each arrangement in make test-newest.
EACH_TIME = ("clip", "one map")
WHOLE = (*EACH_TIME, "gpt2", "residual", "llama", "gemma2", "gpt_neox", "t5, ungated", "chain")
SLOW = (
    "clip, 3 tasks",
    "phi",
    "t5, ungated",
    "qwen2, left",
    "olmo2",
    "granite",
    "phi3",
    "gpt_neox, serial",
    "t5",
    "residual",
    "starcoder2",
)


@pytest.fixture(autouse=True)
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


def settings_of(suite: Suite, **changes: Any) -> FeatCalSettings:
    """FeatCal+ but for some changes."""
    values: dict[str, Any] = {"samples_per_task": samples_in(suite), "sums_precision": "float64"}
    if changes.get("ridge") == "fixed":
        values |= {"ridge_lambda": 0.05, "eps": 0.0}
    return FeatCalSettings(calibrate_norm=False, **(values | PLUS | changes))


def expected(suite: Suite, settings: FeatCalSettings) -> nn.Module:
    model = suite.to(torch.float64).merged
    load(model, calibrated_plus(suite, settings))
    return model


def run_of(suite: Suite, settings: FeatCalSettings) -> CalibrationResult:
    return calibrate(
        suite.merged,
        suite.base,
        suite.experts,
        suite.inputs,
        settings,
        family=suite.family,
        progress=False,
    )


def found(suite: Suite, settings: FeatCalSettings) -> nn.Module:
    return run_of(suite, settings).model


def cases() -> list[Any]:
    """Every suite as FeatCal+, and one of each arrangement with each part left out."""
    both = [
        (name, variant)
        for name in SUITES
        for variant in (VARIANTS if name in WHOLE else ["plus"])
        if name == "clip" or variant not in FACTORS
    ]
    return [
        case
        if case[0] in EACH_TIME or (case[1] == "plus" and case[0] not in SLOW)
        else pytest.param(*case, marks=pytest.mark.slow)
        for case in both
    ]


@pytest.mark.parametrize(("name", "variant"), cases())
def test_plus_equals_the_oracle(name: str, variant: str):
    suite = SUITES[name]()
    settings = settings_of(suite, **VARIANTS[variant])
    assert_same(found(suite, settings), expected(suite, settings), EXACT)


@pytest.mark.parametrize(
    ("name", "least", "most"), [("clip, long step", 0.5, 1), ("clip, too long", 1, 3)]
)
def test_shares_of_the_experts_steps_are_in_the_log(name: str, least: float, most: float):
    suite = SUITES[name]()
    log = run_of(suite, settings_of(suite)).log
    shares = [record["step_share"] for record in log.of_kind("module")]
    assert sum(least < share < most for share in shares) >= 4


def test_rows_that_predict_no_target_can_be_left_out():
    suite = decoder_suite("llama", seed=8)
    models = []
    for rows in ("all", "targets"):
        settings = settings_of(suite, decoder_rows=rows)
        models.append(expected(suite, settings))
        assert_same(found(suite, settings), models[-1], EXACT)
    assert distance(*models) > 1e-3


@pytest.mark.parametrize("name", SUITES)
def test_the_writers_listed_by_hand_make_the_blocks_output(name: str):
    suite = SUITES[name]()
    for block in suite.blocks:
        names = modules_of(suite.merged, [block])[block]
        names = [module for module in names if is_linear(suite.merged, module)]
        writers = writers_of(suite.merged, block, names)
        for batches in suite.inputs.values():
            seen = Seen(*record(suite.merged, batches, [block], [block, *writers]))
            if writers:
                written = stream(seen, [block, *writers])
                torch.testing.assert_close(written, seen.outputs([block]), rtol=0, atol=1e-12)
        if not writers:
            assert name in NO_WRITERS


def test_experts_equal_to_the_merged_model_change_nothing():
    suite = gpt2_suite(seed=1)
    suite = replace(suite, experts=dict.fromkeys(suite.experts, suite.merged))
    for changes in ({}, {"stages": 1}):
        assert_same(expected(suite, settings_of(suite, **changes)), suite.merged, 1e-12)


def test_a_huge_fixed_ridge_gives_the_anchor():
    suite = gpt2_suite(seed=2)
    settings = settings_of(suite, ridge="fixed", stages=1, ridge_lambda=1e12, anchor_rho=2.5)
    new = calibrated_plus(suite, settings)
    merged, base = (dict(m.named_parameters()) for m in (suite.merged, suite.base))
    for name in new:
        if name.endswith("weight"):
            wanted = 2.5 * merged[name] - 1.5 * base[name]
            torch.testing.assert_close(new[name], wanted, rtol=0, atol=1e-8)


def test_a_linear_drift_of_one_expert_is_recovered():
    suite = stack_suite(biased, tasks=1, sizes=(20, 17), seed=3)
    suite = replace(suite, blocks=suite.blocks[:1])
    (expert,) = suite.experts.values()

    def drift(model: nn.Module) -> Tensor:
        sides: list[Any] = [model, expert]
        x = torch.cat(suite.inputs["task_0"])
        with torch.no_grad():
            ours, theirs = (side.layers[0](side.embed(x)) for side in sides)
        return (ours - theirs).norm() / theirs.norm()

    assert drift(suite.merged) > 0.02
    assert drift(expected(suite, settings_of(suite))) < 1e-3
    assert (
        drift(expected(suite, settings_of(suite, target="module"))) > 0.01
    )  # the hidden input drifts, too
