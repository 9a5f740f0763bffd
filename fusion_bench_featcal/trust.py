"""Trust in each task's samples, which sets the weight of rows from its expert's weights."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.finite import read_back
from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.problem import Problem
from fusion_bench_featcal.streams.samples import naming_module
from fusion_bench_featcal.streams.streams import Streams
from fusion_bench_featcal.streams.task_rows import folded_rows

logger = logging.getLogger(__name__)

ENOUGH = 64
"""Number of a task's samples, including copies, below which weights count more."""

FAMILIAR = 0.3
"""Smallest trust at which samples count in full. Tasks below are reported. On the bundled suites
a task's samples are at 0.34 or more, another task's samples at 0.23 or less."""

LEAST = 1 / 4
"""Smallest share of `FAMILIAR` used for samples."""


def with_trust(problem: Problem, block: str, groups: Sequence[Group]) -> Problem:
    """Return the problem with a rule that weighs rows from weights for each task.

    With `m_i` samples, including copies, and trust in them,

        gamma_i = gamma max(64 / m_i, 1) / min(max(trust_i / 0.3, 1/4), 1)^2

    A warning names samples that do not resemble the expert's training data.

    Args:
        problem: The problem, whose rule is `Plus`.
        block: The first block, which the samples have reached.
        groups: Its groups.
    """
    trust, streams = measured_trust(problem, block, groups), problem.streams
    for task, value in trust.items():
        problem.log.add("trust", {"task": task, "trust": value, "named": value < FAMILIAR})
        if value < FAMILIAR:
            logger.warning(
                "task %s: its calibration samples do not look like the data that its expert was "
                "trained on (trust %.2f, below %.1f), so they count less. Check "
                "modelpool.train_datasets.%s or method.calibration_data.%s",
                *(task, value, FAMILIAR, task, task),
            )
    counts: dict[str, int] = {}
    for part in problem.team.gather({task: streams.used(task) for task in streams.tasks}):
        counts |= {task: counts.get(task, 0) + count for task, count in part.items()}
    rule: Any = problem.rule
    gammas = {
        task: rule.gamma * max(ENOUGH / count, 1) / familiarity(trust.get(task, FAMILIAR)) ** 2
        for task, count in counts.items()
    }
    return replace(problem, rule=replace(rule, gammas=gammas))


def familiarity(trust: float) -> float:
    """Return the factor for samples of a given trust."""
    return min(max(trust / FAMILIAR, LEAST), 1.0)


@exact_products()
def measured_trust(problem: Problem, block: str, groups: Sequence[Group]) -> dict[str, float]:
    """Return trust in each task's samples, or nothing if there is nothing to compare.

    It is measured before the first solve, at the inputs of the first linear modules of the first
    block. With `P_i = tau_i' tau_i` of these modules, `tau_i = W_i - W_base`, and `G_j` the second
    moment of task j's inputs,

        c_ij    = cos_F(P_i, G_j)
        trust_i = (c_ii - mean_j c_ij) / (c_ii (1 - mean_j cos_F(P_i, P_j)))

    It is 0 if an expert fits its samples no better than other tasks' samples.

    Args: as for `with_trust`.
    """
    linear = (group for group in groups if group.kind == "linear" and not group.convolves)
    group = next(linear, None)
    if group is None or problem.base is None:
        return {}
    base = group.linear(problem.base.tensor, torch.float32).weight
    streams, team = problem.streams, problem.team
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    sums = ((task, {group: sums_of(streams, task, block, group, base)}) for task in streams.tasks)
    for task, of_group in team.whole(sums):
        with problem.experts[task].loaded(group.parameters) as expert:
            tau = group.linear(expert.get_parameter, torch.float32).weight - base
        tau = tau / tau.abs().amax().clamp_min(torch.finfo(tau.dtype).tiny)  # prevents overflow
        inputs = of_group[group].mirrored().means(centred=False).gram[0]
        pairs[task] = direction(tau.mT @ tau).cpu(), direction(inputs).cpu()
    gathered = {task: pair for part in team.gather(pairs) for task, pair in part.items()}
    if len(gathered) < 2:
        return {}
    weights, inputs = (torch.stack(column) for column in zip(*gathered.values(), strict=True))
    return dict(zip(gathered, read_back([trust_of(weights, inputs)]), strict=True))


def sums_of(streams: Streams, task: str, block: str, group: Group, like: Tensor) -> Moments:
    """Return sums over a group's inputs for a task's samples in the model."""
    sums = Moments.zeros(1, group.maps, group.inputs, 0, like)
    for batch in streams.visits(task):
        if batch.is_held_out:
            continue
        inputs = streams.inputs_of(task, batch, block, [group], watched=False)
        with naming_module(task, block, group.name), exact_products():
            for x in inputs[group.name]:
                for _, values, _, weights in folded_rows(batch, group, x):
                    sums.add(0, values, None, weights)
    return sums


def trust_of(weights: Tensor, inputs: Tensor) -> Tensor:
    """Return `trust_i`, `[n]`.

    Args:
        weights: `P_i` of norm 1, `[n, d * d]`.
        inputs: `G_j` of norm 1, `[n, d * d]`.
    """
    likeness, of_own = weights @ inputs.mT, (weights * inputs).sum(-1)
    alike = (weights @ weights.mT).mean(-1)
    return (of_own - likeness.mean(-1)) / (of_own * (1 - alike)).clamp_min(1e-12)


def direction(matrix: Tensor) -> Tensor:
    """Return a matrix as a vector of norm 1. Zero stays zero."""
    flat = matrix.flatten()
    return flat / flat.norm().clamp_min(torch.finfo(flat.dtype).tiny)
