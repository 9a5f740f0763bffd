"""FeatCal+ with few or equal samples, and its trust in samples."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, cast, run_fast
from plus_slow import FAMILIAR, calibrated_plus, listen, trained
from tiny_convs import unit_suite
from tiny_models import Suite, clip_suite, decoder_suite, normal
from torch import Tensor, nn
from tricky_models import biased, plain, stack_suite
from variations import models_of, size_of

from fusion_bench_featcal import FeatCalSettings, Plus, calibrate
from fusion_bench_featcal.rules.plus import RIDGES, largest_of_equal, ridge_of_least_error
from fusion_bench_featcal.run import trust


@pytest.mark.parametrize("bias", [True, False])
def test_equal_inputs_change_biases_or_weights_but_not_both(bias: bool):
    suite = stack_suite(biased, tasks=1)
    first = suite.inputs["task_0"][0][:1]
    suite.inputs = {"task_0": [first.repeat(5, 1), first.repeat(2, 1)]}
    rule = Plus(gamma=0.0, calibrate_bias=bias)
    model = run_fast(suite, **PLUS | {"rule": rule, "calibrate_bias": bias}).model
    for block in suite.blocks:
        for leaf, is_changed in (("weight", not bias), ("bias", bias)):
            name = f"{block}.only.{leaf}"
            equal = torch.equal(model.get_parameter(name), suite.merged.get_parameter(name))
            assert equal != is_changed
        batches, names = cast(suite.inputs, torch.float64)["task_0"], [f"{block}.only"]
        outputs, expected = (
            listen(side, batches, block, names).outputs(names)
            for side in (model, suite.experts["task_0"])
        )
        # a bias alone reaches the outputs of a single input
        assert (outputs - expected).norm() < 1e-5 * expected.norm()


def test_steps_of_convolutions_from_few_images_are_scaled_down():
    """In the first turn, before other modules' steps change the inputs."""
    suite, name, steps = unit_suite(), "1.wide.weight", []
    (count,) = {sum(map(size_of, batches)) for batches in suite.inputs.values()}
    for scale in (1.0, 0.2, None):
        scales = {} if scale is None else dict.fromkeys(suite.inputs, scale)
        settings: dict[str, Any] = PLUS | {"rule": Plus(convolution_scales=scales)}
        model = run_fast(suite, **settings).model
        steps.append(model.get_parameter(name) - suite.merged.get_parameter(name))
    assert steps[0].norm() > 0 and count < 64
    torch.testing.assert_close(steps[1], 0.2 * steps[0])
    torch.testing.assert_close(steps[2], (count / 64) ** 0.5 * steps[0])


@pytest.mark.parametrize("is_solved", [True, False])
def test_of_ridges_with_equal_errors_up_to_rounding_the_largest_is_taken(is_solved: bool):
    suite = stack_suite(biased, tasks=1, sizes=(40,))  # of full rank
    if is_solved:  # every step is zero
        suite.experts = dict.fromkeys(suite.experts, suite.merged)
    ridges = Plus().ridges if is_solved else (1e-14, 1e-13, 1e-12)
    settings: dict[str, Any] = PLUS | {"rule": Plus(0.0, ridges=ridges)}
    modules = run_fast(suite, **settings).log.select("module")
    assert {record["ridge"] for record in modules} == {ridges[-1]}


@pytest.mark.parametrize(
    ("errors", "trials"),  # by ridge, from 1e-4 to 10
    [
        ([9.0, 8.0, 7.0, 1.0, 2.0, 3.0], 4),
        ([9.0, 8.0, 1.0, 2.0, 3.0, 4.0], 5),
        ([9.0, 1.0, 2.0, 3.0, 4.0, 5.0], 6),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 6),
        ([3.0, 3.0, 3.0, 4.0, 5.0, 2.0], 4),  # of few held-out rows
        ([5.0, 3.0, 1.0, 1.005, 1.009, 4.0], 4),  # equal to rounding
        ([math.inf, math.inf, math.inf, 2.0, 1.0, 3.0], 4),  # unsolved ones
        ([0.0] * 6, 4),
    ],
)
def test_of_small_ridges_only_those_that_may_be_best_are_tried(errors: list[float], trials: int):
    pairs, tried = {r: (e, 0.01) for r, e in zip(RIDGES, errors, strict=True)}, list[float]()

    def error_of(ridge: float) -> tuple[float, float]:
        tried.append(ridge)
        return pairs[ridge]

    assert ridge_of_least_error(RIDGES, error_of) == largest_of_equal(pairs)
    assert tried == sorted(RIDGES, reverse=True)[:trials]


def test_without_any_finite_error_a_ridge_of_one_percent_is_taken():
    assert ridge_of_least_error((1e-4, 1.0), lambda _: (math.inf, 0.0)) == 1e-2


def test_zero_inputs_change_nothing_and_without_a_base_samples_alone_count():
    suite = stack_suite(biased)
    samples_alone: dict[str, Any] = PLUS | {"rule": Plus(gamma=0.0)}
    without_base = run_fast(suite, has_base=False, **PLUS).model
    assert_identical(without_base, run_fast(suite, **samples_alone).model)
    suite = stack_suite(plain)
    for model in models_of(suite):
        nn.init.zeros_(model.get_parameter("embed.bias"))
    suite.inputs = {task: [torch.zeros(4, 4)] for task in suite.inputs}
    assert_identical(run_fast(suite, **PLUS).model, suite.merged)


@pytest.mark.parametrize("make", [partial(clip_suite, tasks=1), decoder_suite])
def test_a_rule_object_and_its_name_give_equal_bits(make: Callable[[], Suite]):
    suite = make()
    models = suite.merged, suite.base, suite.experts
    by_object, *by_name = (
        calibrate(*models, suite.inputs, settings, suite.family, progress=False)
        for settings in (
            Plus(),
            FeatCalSettings(rule="plus"),
            FeatCalSettings(rule="plus", augment="auto", decoder_rows="auto", calibrate_norm=False),
        )
    )
    for other in by_name:
        assert_identical(other.model, by_object.model)
    samples = sum(map(size_of, suite.inputs["task_0"]))
    block_rows = [r["rows"] for r in by_object.log.select("task") if r["task"] == "task_0"]
    rows, *_, last = block_rows
    if "labels" in suite.inputs["task_0"][0]:  # in the last block only targets count
        assert last < rows == sum(b["attention_mask"].sum() for b in suite.inputs["task_0"])
    else:  # 5 positions of each image and of its 7 copies
        assert rows == samples * 5 * 8


def trained_suite() -> Suite:
    """A suite whose experts' steps lie along the inputs of their tasks."""
    suite = clip_suite()
    for number, batches in enumerate(suite.inputs.values()):
        for batch in batches:  # images of one task have a common part
            batch["pixel_values"] += 3 * normal(number, *batch["pixel_values"].shape[1:])
    return trained(suite)


def test_trust_reads_each_expert_once(monkeypatch: pytest.MonkeyPatch):
    read, task_vector_of = list[str](), trust.task_vector_of

    def counting(problem: Any, group: Any, task: str, base: Tensor) -> Tensor:
        read.append(task)
        return task_vector_of(problem, group, task, base)

    monkeypatch.setattr(trust, "task_vector_of", counting)
    suite = stack_suite(plain, tasks=4)
    run_fast(suite, **PLUS)
    assert read == [*suite.inputs]


def test_agreement_is_of_pairs_and_no_factor_of_an_expert_or_of_samples_changes_it():
    similarity = normal(0, 4, 4).abs() + 0.1 + torch.eye(4, dtype=torch.float64)
    overlaps, factors = torch.full((4,), 0.5, dtype=torch.float64), normal(1, 4).exp()
    agreement = trust.agreement_of(similarity, overlaps)
    assert agreement > trust.UNLIKE > trust.agreement_of(similarity.roll(1, 0), overlaps)
    for scaled in (similarity * factors, similarity * factors[:, None]):
        assert trust.agreement_of(scaled, overlaps) == pytest.approx(agreement)
    equal = factors[:, None] * normal(2, 4).exp()  # the same samples for all, of other sizes
    assert trust.agreement_of(equal, overlaps) == pytest.approx(0, abs=1e-12)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(0))
    assert trust.agreement_of(similarity[order][:, order], overlaps) == pytest.approx(agreement)


def test_trust_is_measured_where_every_expert_differs_from_the_base():
    suite = trained_suite()
    block, task = suite.blocks[0], next(iter(suite.experts))
    attention = f"{block}.self_attn."
    for name, parameter in suite.base.named_parameters():  # as an adapter of the MLP alone
        if name.startswith(attention):
            suite.experts[task].get_parameter(name).data = parameter.data.clone()
    (record,) = run_fast(suite, **PLUS).log.select("agreement")
    assert math.isfinite(record["agreement"])
    for expert in suite.experts.values():  # experts that differ behind the first block only
        for name, parameter in suite.base.get_submodule(block).named_parameters(prefix=block):
            expert.get_parameter(name).data = parameter.data.clone()
    log = run_fast(suite, **PLUS).log
    assert not log.select("agreement") and not log.select("trust")


def test_exchanged_samples_are_named_and_count_less(caplog: pytest.LogCaptureFixture):
    suite = trained_suite()
    same = dict.fromkeys(suite.inputs, next(iter(suite.inputs.values())))
    for unchanged in (suite, replace(suite, inputs=same)):
        trust_in = run_fast(unchanged, **PLUS).log.select("trust")
        assert {record["fits"] for record in trust_in} == {None}
    assert "its expert fits" not in caplog.text
    one, two, right = suite.inputs
    suite.inputs |= {one: suite.inputs[two], two: suite.inputs[one]}
    result = run_fast(suite, **PLUS)
    records = {record["task"]: record for record in result.log.select("trust")}
    fits = {task: record["fits"] for task, record in records.items()}
    assert fits == {one: two, two: one, right: None}
    assert max(records[one]["trust"], records[two]["trust"]) < FAMILIAR
    for task, other in ((one, two), (two, one)):
        assert (
            f"task {task}: its expert fits the samples of task {other} better than its own."
            in caplog.text
        )
    for name, value in calibrated_plus(suite).items():
        torch.testing.assert_close(result.model.get_parameter(name), value)
