"""The smaller loop gives what an independent slow calibration gives, for both rules."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrations import EXACT, PAPER, assert_same, cast, run_slow, samples_in, settings_of
from oracle import Knobs
from plus_slow import calibrated_plus
from tiny_models import Suite, clip_suite, decoder_suite, gpt2_suite, residual_suite, t5_suite
from torch import nn
from tricky_models import plain, stack_suite

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
    return calibrate(suite.merged, suite.base, suite.experts, inputs, settings.replace(rule=rule))


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


@pytest.mark.parametrize("gamma", [0.0, 1.0, 24.0])
@pytest.mark.parametrize("make", SUITES.values(), ids=list(SUITES))
def test_plus_equals_the_oracle(make, gamma):
    suite = make()
    wanted = calibrated_plus(suite, gamma)
    found = run(suite, Plus(gamma=gamma)).model
    for name, value in wanted.items():
        torch.testing.assert_close(found.get_parameter(name).double(), value, rtol=1e-6, atol=1e-8)
    moved = {
        n for n, p in found.named_parameters() if not torch.equal(p, suite.merged.get_parameter(n))
    }
    assert moved and moved <= set(wanted)


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
        kind="linear", has_few_outputs=True, biased=True, dtype=torch.bfloat16
    )
    merged, expert = (Linear(draw(1, 3, 5), draw(1, 3)) for _ in range(2))
    sums = rule.sums(group, merged, None)
    rows = Moments.zeros(rule.folds, 1, 5, 3, merged.weight)
    for fold in range(rule.folds):
        rows.add(fold, draw(40, 5) + 1, draw(40, 3))
    rows = rows.mirrored()
    sums.add("a", rows, expert)
    solved = sums.solve().linear
    assert torch.equal(solved.weight, solved.weight.bfloat16().double())
    whole, drift = rows.total(), getattr(rule, "mix_alpha", 1.0)
    x, y = whole.x[0, 0] / whole.count[0, 0], drift * whole.y[0, 0] / whole.count[0, 0]
    target = expert.weight[0] @ x + y + expert.bias[0]
    weight = whole.task_weights(1e-8)[0]
    free = target - solved.weight[0] @ x
    pull = getattr(rule, "ridge_lambda", 0.0)
    wanted = (weight * free + pull * merged.bias[0]) / (weight + pull)
    torch.testing.assert_close(solved.bias[0], wanted)
