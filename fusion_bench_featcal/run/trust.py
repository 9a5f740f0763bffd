"""Trust in each task's samples, which sets the weight of rows from its expert's weights."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.run.log import doubts
from fusion_bench_featcal.run.problem import Problem
from fusion_bench_featcal.streams.samples import naming_module
from fusion_bench_featcal.streams.task_rows import paired_rows

logger = logging.getLogger(__name__)

ENOUGH = 64
"""Number of a task's samples, including copies, below which weights count more."""

FAMILIAR, LEAST = 0.3, 1 / 4
"""Smallest trust at which samples count in full, and the smallest share of it that is used."""

MARGIN = 1.15
"""Ratio of likenesses from which samples count as exchanged. Right ones are below 1.08."""

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""Task -> `tau' tau` of its expert and the second moment of its samples, as vectors of norm 1."""


def with_trust(problem: Problem, block: str, groups: Sequence[Group]) -> Problem:
    """Return the problem with a rule that weighs rows from weights for each task.

    With `k_i` samples, including copies, and trust in them,

        gamma_i = gamma max(64 / k_i, 1) / min(max(trust_i / 0.3, 1/4), 1)^2

    Warnings name tasks whose samples were exchanged, or say that no task's samples fit.

    Args:
        problem: The problem, whose rule is `Plus`.
        block: The first block, which the samples have reached.
        groups: Its groups.
    """
    pairs, streams = pairs_of(problem, block, groups), problem.streams
    trust, exchanged = dict[str, float](), dict[str, str]()
    if len(pairs) > 1:
        tasks = list(pairs)
        weights, inputs = (torch.stack(column) for column in zip(*pairs.values(), strict=True))
        likeness = weights @ inputs.mT
        trust = dict(zip(tasks, trust_of(weights, likeness).tolist(), strict=True))
        exchanged = {tasks[k]: tasks[other] for k, other in exchanged_tasks(likeness).items()}
    for task, value in trust.items():
        problem.log.add("trust", {"task": task, "trust": value, "fits": exchanged.get(task)})
    for task, doubt in doubts(problem.log.of_kind("trust")).items():
        logger.warning(
            "%s%s Check modelpool.train_datasets and method.calibration_data",
            *(task and f"task {task}: ", doubt),
        )
    rule: Any = problem.rule
    gammas = dict[str, float]()
    for task in streams.tasks:
        familiar = min(max(trust.get(task, FAMILIAR) / FAMILIAR, LEAST), 1.0)
        gammas[task] = rule.gamma * max(ENOUGH / streams.used(task), 1) / familiar**2
    return replace(problem, rule=replace(rule, gammas=gammas))


@exact_products()
def pairs_of(problem: Problem, block: str, groups: Sequence[Group]) -> Pairs:
    """Return what all tasks' weights and samples are compared by, or nothing without modules.

    It is measured at the inputs of the first linear modules of a block.
    """
    linear = (group for group in groups if group.kind == "linear" and not group.convolves)
    group, streams, pairs = next(linear, None), problem.streams, dict[str, Any]()
    if group is None or problem.base is None:
        return {}
    base = group.linear(problem.base.tensor, torch.float32).weight
    for task in streams.tasks:
        sums = Moments.zeros(group.inputs, 0, base)
        for batch in streams.visits(task):
            x = streams.inputs_of(task, batch, block, [group])[group.name]
            with naming_module(task, block, group.name):
                for _, rows, _ in paired_rows(batch, group, x):
                    sums.add(rows)
        with problem.experts[task].loaded(group.parameters) as expert:
            tau = group.linear(expert.get_parameter, torch.float32).weight - base
        tau = tau / tau.abs().amax().clamp_min(torch.finfo(tau.dtype).tiny)  # prevents overflow
        pairs[task] = direction(tau.mT @ tau), direction(sums.mirrored().means(centred=False).gram)
    gathered = problem.processes.gather(pairs)
    return {task: pair for part in gathered for task, pair in part.items()}


def trust_of(weights: Tensor, likeness: Tensor) -> Tensor:
    """Return trust in each task's samples, `[tasks]`.

    With `P_i = tau_i' tau_i`, `tau_i = W_i - W_base`, and `G_j` the second moment of task j's
    inputs,

        c_ij    = cos_F(P_i, G_j)
        trust_i = (c_ii - mean_j c_ij) / (c_ii (1 - mean_j cos_F(P_i, P_j)))

    It is 0 if an expert fits its samples no better than other tasks' samples.

    Args:
        weights: `P_i` as vectors of norm 1, `[tasks, d * d]`.
        likeness: `c`, `[tasks, tasks]`.
    """
    of_own, alike = likeness.diagonal(), (weights @ weights.mT).mean(-1)
    return (of_own - likeness.mean(-1)) / (of_own * (1 - alike)).clamp_min(1e-12)


def exchanged_tasks(likeness: Tensor) -> dict[int, int]:
    """Return tasks that another task's samples belong to, in the best assignment of all to all.

    None are returned unless that assignment is better by `MARGIN` over the tasks that it changes.
    If it changes all tasks, such as both of two, no right task confirms that experts and samples
    can be compared, so none are returned either. Argument as for `trust_of`.
    """
    from scipy.optimize import linear_sum_assignment

    table = likeness.double().numpy()
    _, best = linear_sum_assignment(table, maximize=True)
    changed = [(k, int(other)) for k, other in enumerate(best) if k != other]
    assigned, better = sum(table[k, k] for k, _ in changed), sum(table[c] for c in changed)
    some = len(changed) < len(best)
    return dict(changed) if some and better > MARGIN * assigned else {}


def direction(matrix: Tensor) -> Tensor:
    """Return a matrix as a vector of norm 1 on the CPU. Zero stays zero."""
    flat = matrix.flatten()
    return (flat / flat.norm().clamp_min(torch.finfo(flat.dtype).tiny)).cpu()
