"""Distillation: trained parameters and targets, beside a slow version."""

import copy
from typing import Any

import pytest
import torch
from calibrations import assert_identical, gamma
from rivals import generator
from tiny_models import Suite, clip_suite, decoder_suite
from tiny_pools import in_memory
from torch import Tensor, nn

from fusion_bench_featcal.lab import rivals


def distilled(suite: Suite, **settings: Any) -> Any:
    options = {"steps": 60, "learning_rate": 3e-3, "samples_per_task": 7, "family": suite.family}
    method = rivals.Distillation(**(options | settings))
    return method.post_merge(copy.deepcopy(suite.merged), in_memory(suite))


def distilled_by_hand(suite: Suite, steps: int, rate: float, seed: int) -> tuple[nn.Module, dict]:
    """Adam with a falling rate on the mean over tasks of relative squared distances."""
    model, tasks = copy.deepcopy(suite.merged).requires_grad_(False), list(suite.experts)
    inside = tuple(f"{block}." for block in suite.blocks)
    weights = [w.requires_grad_() for n, w in model.named_parameters() if n.startswith(inside)]

    def features(net: nn.Module, batch: Any) -> Tensor:
        return net(**batch).pooler_output

    with torch.no_grad():
        targets = {t: [features(suite.experts[t], b) for b in suite.inputs[t]] for t in tasks}
    norms = {t: torch.cat(targets[t]).square().mean() for t in tasks}
    orders: dict[str, list[int]] = {}
    for task in tasks:
        numbers = generator(seed, task, "batches")
        passes = [torch.randperm(len(targets[task]), generator=numbers) for _ in range(steps)]
        orders[task] = torch.cat(passes).tolist()
    losses: dict[str, list[float]] = {task: [] for task in tasks}
    adam = torch.optim.Adam(weights, rate)
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for task in tasks:
            index = orders[task][step]
            far = features(model, suite.inputs[task][index]) - targets[task][index]
            loss = far.square().mean() / norms[task]
            losses[task].append(loss.item())
            total = total + loss / len(tasks)
        adam.param_groups[0]["lr"] = rate * (1 - step / steps)
        adam.zero_grad()
        total.backward()
        adam.step()
    return model, losses


def test_distillation_trains_as_written_out() -> None:
    """So the loss, its batches and their order, and the weight of tasks are the described ones."""
    suite = clip_suite(sizes=(2, 2, 3))
    result = distilled(suite, steps=5, seed=3)
    reference, losses = distilled_by_hand(suite, steps=5, rate=3e-3, seed=3)
    # Adam divides a gradient, a sum of hundreds of products, by its size plus 1e-8.
    bound = 5 * 3e-3 * gamma(1000, torch.float64) / 1e-8
    for name, value in reference.named_parameters():
        parameter = result.model.get_parameter(name)
        torch.testing.assert_close(parameter, value, rtol=0, atol=bound)
        assert parameter.requires_grad == suite.merged.get_parameter(name).requires_grad
    for task, curve in result.curves.items():
        mean = sum(losses[task]) / 5  # a curve has six digits
        first, last = (pytest.approx(loss, rel=5.1e-6) for loss in (losses[task][0], mean))
        assert curve == [(0, first), (5, last)]


def test_positions_that_predict_nothing_have_no_part_in_the_loss() -> None:
    suite = decoder_suite(extra=3)
    reference = distilled(suite, steps=3).model
    for batch in (batch for batches in suite.inputs.values() for batch in batches):
        batch["input_ids"][batch["attention_mask"] == 0] = 7
    assert_identical(distilled(suite, steps=3).model, reference)
