"""The loop gives what an independent slow calibration gives, for both rules."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrations import (
    EXACT,
    PAPER,
    assert_same,
    cast,
    replay,
    run_slow,
    samples_in,
    settings_of,
    with_rule,
)
from oracle import Knobs
from plus_slow import calibrated_plus, load
from tiny_models import (
    VOCABULARY,
    Suite,
    clip_suite,
    decoder_suite,
    gpt2_suite,
    replayed,
    residual_suite,
    sentences,
    t5_suite,
    without_labels,
)
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from tricky_models import biased, chain, few_outputs, keyword_calls, plain, stack_suite, used_twice

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.rules.paper import Paper
from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.rules.rule import Linear

SUITES = {
    "clip": clip_suite,
    "t5": t5_suite,
    "llama": decoder_suite,
    "gpt2": gpt2_suite,
    "residual": residual_suite,
}
KNOBS = {
    "paper": PAPER,
    "small lambda": Knobs(lam=1e-4, rho=1.0, alpha=0.6),
    "no expert features": Knobs(alpha=0.0),
    "weights alone": Knobs(bias=False, norm=False, rho=0.5),
}


def run(suite: Suite, rule: Any, **more: Any) -> Any:
    settings = settings_of(Knobs(), suite, family=suite.family, **more)
    inputs = cast(suite.inputs, next(suite.merged.parameters()).dtype)
    return calibrate(suite.merged, suite.base, suite.experts, inputs, with_rule(settings, rule))


@pytest.mark.parametrize("knobs", KNOBS.values(), ids=list(KNOBS))
@pytest.mark.parametrize("make", SUITES.values(), ids=list(SUITES))
def test_paper_equals_the_oracle(make, knobs):
    suite = make()
    rule = Paper(
        ridge_lambda=knobs.lam,
        mix_alpha=knobs.alpha,
        anchor_rho=knobs.rho,
        eps=knobs.eps,
        calibrate_bias=knobs.bias,
        calibrate_norm=knobs.norm,
    )
    slow = run_slow(suite, knobs)
    result = run(suite, rule)
    assert_same(result.model, slow.model, EXACT)
    for record in result.log.of_kind("task"):
        wanted = slow.drift[record["block"], record["task"]]
        found = [
            record[f"{part}drift_{when}"]
            for when in ("before", "after")
            for part in ("", "relative_")
        ]
        assert found == pytest.approx(wanted, rel=1e-6)


def parallel_suite(make: str, *, seed: int) -> Suite:
    """Decoders with parallel branches and without a family of their own."""
    torch.manual_seed(seed)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shape = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(make, **shape, **ends)).eval()
    inputs: dict[str, list] = {
        f"task_{index}": [
            without_labels(sentences(part, max(part) + 1, seed=seed + 10 * index + i))
            for i, part in enumerate([[5, 2, 4], [3, 6, 4 + index]])
        ]
        for index in range(2)
    }
    inner = "gpt_neox" if make == "gpt_neox" else "model"
    return replayed(model, inputs, [f"{inner}.layers.{index}" for index in range(2)], seed)


def small_clip(**shape: Any) -> Suite:
    return clip_suite(width=8, heads=2, **shape)


PLUS_SUITES: dict[str, Callable[[], Suite]] = {
    **SUITES,
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
    "used twice": lambda: stack_suite(used_twice, sizes=(5, 2), seed=1),
    "keyword calls": lambda: stack_suite(keyword_calls, sizes=(5, 2), seed=1),
    "chain": lambda: stack_suite(chain, sizes=(5, 2), seed=1),
    "few outputs": lambda: stack_suite(few_outputs, sizes=(5, 2), seed=1),
    "one map": lambda: stack_suite(biased, sizes=(5, 2), seed=1),
    "one map, no bias": lambda: stack_suite(plain, sizes=(5, 2), seed=1),
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
    found = run(suite, Plus(**fields), decoder_rows=rows).model
    moved = {
        n for n, p in found.named_parameters() if not torch.equal(p, suite.merged.get_parameter(n))
    }
    assert moved and moved <= set(new)
    load(suite.merged, new)
    assert_same(found, suite.merged, EXACT)


@pytest.mark.parametrize("rule", [Paper(), Plus()], ids=["paper", "plus"])
def test_batches_of_any_size_and_copies_of_tasks_change_nothing(rule):
    suite = clip_suite()
    whole = run(suite, rule).model
    images = {
        task: torch.cat([b["pixel_values"] for b in batches])
        for task, batches in suite.inputs.items()
    }
    suite.inputs = {
        task: [{"pixel_values": part} for part in all_.split(2)] for task, all_ in images.items()
    }
    assert_same(run(suite, rule).model, whole, EXACT)


def test_nothing_moves_where_experts_are_the_merged_model():
    suite = clip_suite()
    suite.experts = dict.fromkeys(suite.experts, suite.merged)
    suite.base = suite.merged
    for rule in (Paper(eps=0.0), Plus()):
        assert_same(run(suite, rule).model, suite.merged, 1e-13)


def test_a_dead_task_and_a_singular_system_are_named():
    suite = clip_suite()
    with pytest.raises(CalibrationError, match=r"module .*singular.*method.ridge_lambda \(now 0"):
        run(suite, Paper(ridge_lambda=0.0, eps=0.0), samples_per_task=1)
    assert samples_in(suite) > 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(2))
def test_a_direction_that_no_sample_has_is_not_solved_silently(seed: int, dtype: torch.dtype):
    suite = stack_suite(plain, sizes=(30, 30), seed=seed)
    direction = nn.functional.normalize(torch.ones(4, dtype=torch.float64), dim=0)
    for model in (suite.merged, suite.base, *suite.experts.values()):
        embed: Any = model.get_submodule("embed")
        with torch.no_grad():
            for parameter in (embed.weight, embed.bias):
                parameter -= torch.einsum("i,j,j...->i...", direction, direction, parameter)
    rule = Paper(ridge_lambda=0.0, eps=0.0)
    with pytest.raises(CalibrationError, match=r"layers\.0.*singular.*method\.ridge_lambda"):
        run(suite.to(dtype), rule)


@pytest.mark.parametrize("rule", [Paper(ridge_lambda=0.05), Plus()], ids=["paper", "plus"])
def test_biases_make_up_for_the_rounding_of_weights(rule: Any):
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    group: Any = SimpleNamespace(
        kind="linear", convolves=False, has_few_outputs=True, biased=True, dtype=torch.bfloat16
    )
    merged, expert = (Linear(draw(1, 3, 5), draw(1, 3)) for _ in range(2))
    sums = rule.sums(group, merged, None)
    rows = Moments.zeros(rule.folds, 1, 5, 3, merged.weight)
    for fold in range(rule.folds):
        rows.add(fold, draw(40, 5) + 1, draw(40, 3))
    rows = rows.mirrored()
    sums.add("a", rows, expert)
    solved = sums.solve().linear
    assert solved.weight.dtype == torch.bfloat16
    whole = rows.total()
    x, y = whole.x[0, 0] / whole.count[0, 0], whole.y[0, 0] / whole.count[0, 0]
    target = y + expert.bias[0]  # `y` is what the expert's weight makes of the target's input
    weight = whole.task_weights(1e-8)[0]
    free = target - solved.weight[0].double() @ x
    pull = getattr(rule, "ridge_lambda", 0.0)
    wanted = (weight * free + pull * merged.bias[0]) / (weight + pull)
    torch.testing.assert_close(solved.bias[0], wanted)
