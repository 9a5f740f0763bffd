"""Gradient fine-tuning after FeatCal+ keeps the best state on held-out samples, or the start."""

import copy
from typing import Any

import pytest
import torch
from calibrations import assert_identical, distance
from tiny_models import Suite, clip_suite, decoder_suite
from tiny_pools import in_memory
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab import rivals
from fusion_bench_featcal.lab.rivals.training import task_generator


def polished(suite: Suite, **settings: Any) -> Any:
    options = {"samples_per_task": 7, "family": suite.family, "steps": 30, "learning_rate": 1e-3}
    method = rivals.Polish(**(options | settings))
    return method.post_merge(copy.deepcopy(suite.merged), in_memory(suite))


@torch.no_grad()
def held_out_distance(suite: Suite, model: nn.Module, seed: int) -> float:
    """Mean over tasks of the relative squared distance on a quarter of the samples, one by one."""
    means = list[Tensor]()
    for task, batches in suite.inputs.items():
        images = torch.cat([batch["pixel_values"] for batch in batches])
        drawn = torch.randperm(len(images), generator=task_generator(seed, task, "polish"))
        whole = suite.experts[task](pixel_values=images).pooler_output
        chosen = images[drawn[: len(images) // 4]]
        new, target = (m(pixel_values=chosen).pooler_output for m in (model, suite.experts[task]))
        means.append((new - target).square().mean() / whole.square().mean())
    return float(torch.stack(means).mean())


def test_the_kept_state_is_the_nearest_of_all_measured() -> None:
    suite = clip_suite(sizes=(4, 3))
    result = polished(suite, seed=3)
    curve = result.curves["held out"]
    assert [step for step, _ in curve] == [0, 10, 20, 30]
    values = [value for _, value in curve]
    assert values[0] == pytest.approx(held_out_distance(suite, suite.merged, 3), rel=1e-9)
    assert held_out_distance(suite, result.model, 3) == pytest.approx(min(values), rel=1e-9)
    assert min(values) < values[0]


@pytest.mark.parametrize("rate", [300.0, 1e30])
def test_steps_that_do_not_help_are_undone(rate: float) -> None:
    suite = clip_suite(sizes=(4, 3))
    for model in (suite.merged, suite.base, *suite.experts.values()):
        model.float()
    suite = suite.to(torch.float32)
    if rate > 1e9:
        with pytest.raises(CalibrationError, match="polish diverged"):
            polished(suite, learning_rate=rate)
        return
    assert_identical(polished(suite, learning_rate=rate).model, suite.merged)


def test_only_blocks_change_and_labels_choose_the_positions() -> None:
    suite = decoder_suite(extra=4)
    result = polished(suite, samples_per_task=4).model
    inside = tuple(f"{block}." for block in suite.blocks)
    for name, tensor in suite.merged.state_dict().items():
        if not name.startswith(inside):
            assert torch.equal(result.state_dict()[name], tensor), name
    assert distance(result, suite.merged) > 1e-6


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(CalibrationError, match=r"task_\d: polish holds out one of 4 .* are only 3"):
        polished(clip_suite(sizes=(2, 2)), samples_per_task=3)
