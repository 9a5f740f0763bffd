"""Rules without one of their parts: the tasks' weights, or the order of modules."""

from dataclasses import replace

import pytest
import torch
from calibrations import assert_same, distance, run_fast
from tiny_convs import net_suite, tower_suite
from tiny_models import clip_suite
from tricky_models import plain, stack_suite

from fusion_bench_featcal import Paper, Plus
from fusion_bench_featcal.lab.ablations import AllAtOnce, EqualWeights


@pytest.mark.parametrize("make", [clip_suite, net_suite])  # of which one has groups of channels
def test_equal_weights_change_nothing_if_tasks_are_alike(make) -> None:
    suite = make()
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
    rows = {t: suite.merged.get_submodule("embed")(batch) for t, (batch,) in suite.inputs.items()}
    grams = {task: x.T @ x / len(x) for task, x in rows.items()}
    pull = 0.5 * torch.stack([gram.norm() for gram in grams.values()]).mean()
    right = pull * suite.merged.get_parameter(name)
    right = right + sum(suite.experts[t].get_parameter(name) @ gram for t, gram in grams.items())
    system = sum(grams.values()) + pull * torch.eye(4, dtype=torch.float64)
    weight = run_fast(suite, rule=rule).model.get_parameter(name)
    torch.testing.assert_close(weight, torch.linalg.solve(system, right.T).T)


def test_modules_that_are_solved_at_once_do_not_see_each_other() -> None:
    suite, gammas = clip_suite(tasks=2, depth=1), {"task_0": 2.0, "task_1": 3.0}
    rule = AllAtOnce(gammas=gammas)
    whole, in_order = (run_fast(suite, rule=r).model for r in (rule, Plus(gammas=gammas)))
    assert distance(whole, in_order) > 1e-3
    for names in (["q_proj", "k_proj", "v_proj"], ["out_proj"], ["fc1"], ["fc2"]):
        for name, value in run_fast(suite, rule=rule, modules=names).model.named_parameters():
            if not torch.equal(value, suite.merged.get_parameter(name)):
                torch.testing.assert_close(whole.get_parameter(name), value)
    resnet = tower_suite("resnet")
    assert distance(run_fast(resnet, rule=AllAtOnce()).model, resnet.merged) > 1e-3
