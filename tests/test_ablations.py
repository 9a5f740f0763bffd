"""Rules without one of their parts: the tasks' weights, or the order of modules."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import EXACT, assert_same, distance, run_fast
from tiny_convs import net_suite, tower_suite
from tiny_models import Suite, clip_suite
from tricky_models import biased, plain, stack_suite

from fusion_bench_featcal import Paper, Plus
from fusion_bench_featcal.lab.ablations import AllAtOnce, EqualWeights

GAMMAS = {"task_0": 2.0, "task_1": 3.0}


@pytest.mark.parametrize("make", [clip_suite, net_suite])  # of which one has groups of channels
def test_equal_weights_change_nothing_where_tasks_are_alike(make: Any) -> None:
    suite: Suite = make()
    task, expert = next(iter(suite.experts.items()))
    inputs = {"a": suite.inputs[task], "b": suite.inputs[task]}
    alike = replace(suite, experts={"a": expert, "b": expert}, inputs=inputs)
    wanted = run_fast(alike, rule=Paper(calibrate_norm=False)).model
    # 1 / |G| takes eps, which is not relative
    assert_same(run_fast(alike, rule=EqualWeights(calibrate_norm=False)).model, wanted, 1e-6)


def test_equal_weights_add_gram_matrices_as_they_are() -> None:
    suite = stack_suite(plain, sizes=(9,))
    rule = EqualWeights(ridge_lambda=0.5, mix_alpha=0.0, anchor_rho=1.0, eps=0.0)
    name = "layers.0.only.weight"
    anchor = suite.merged.get_parameter(name)
    embed: Any = suite.merged.get_submodule("embed")
    rows = {task: embed(batch) for task, (batch,) in suite.inputs.items()}
    grams = {task: x.T @ x / len(x) for task, x in rows.items()}
    pull = 0.5 * torch.stack([gram.norm() for gram in grams.values()]).mean()
    pairs = [(suite.experts[task].get_parameter(name), gram) for task, gram in grams.items()]
    right = sum(weight @ gram for weight, gram in pairs) + pull * anchor
    system = sum(grams.values()) + pull * torch.eye(4, dtype=torch.float64)
    found = run_fast(suite, rule=rule).model.get_parameter(name)
    torch.testing.assert_close(found, torch.linalg.solve(system, right.T).T)


def test_modules_that_are_solved_at_once_do_not_see_each_other() -> None:
    suite = clip_suite(tasks=2, depth=1)
    rule = AllAtOnce(gammas=GAMMAS)
    whole, in_order = (run_fast(suite, rule=r).model for r in (rule, Plus(gammas=GAMMAS)))
    assert distance(whole, in_order) > 1e-3
    for names in (["q_proj", "k_proj", "v_proj"], ["out_proj"], ["fc1"], ["fc2"]):
        alone = run_fast(suite, rule=rule, modules=names).model
        for name, value in alone.named_parameters():
            if not torch.equal(value, suite.merged.get_parameter(name)):
                torch.testing.assert_close(whole.get_parameter(name), value)


def test_the_order_of_one_module_is_no_matter() -> None:
    suite = stack_suite(biased)
    wanted = run_fast(suite, rule=Plus()).model
    assert_same(run_fast(suite, rule=AllAtOnce()).model, wanted, EXACT)


def test_modules_with_batch_norm_can_be_solved_at_once() -> None:
    suite = tower_suite("resnet")
    assert distance(run_fast(suite, rule=AllAtOnce()).model, suite.merged) > 1e-3
