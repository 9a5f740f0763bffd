"""Trust in each task's samples, which sets the weight of rows from its expert's weights."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.products import gram_of
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.run.log import exchanged_samples
from fusion_bench_featcal.run.state import CalibrationState
from fusion_bench_featcal.streams.task_sums import paired_features

logger = logging.getLogger(__name__)

ENOUGH_SAMPLES = 64
"""Number of a task's samples, including copies, below which weights count more."""

FAMILIAR, LEAST = 0.3, 1 / 4
"""Smallest trust at which samples count in full, and the smallest share of it that is used."""

MARGIN = 1.15
"""Ratio of likenesses from which samples count as exchanged. Right ones are below 1.08."""


def with_gammas(state: CalibrationState, trust: Mapping[str, float]) -> CalibrationState:
    """Return the problem with a rule that weighs rows from weights for each task.

    With all `k_i` samples of a task, including copies and those that do not run a tower, and trust
    in them,

        gamma_i = gamma max(64 / k_i, 1) / min(max(trust_i / 0.3, 1/4), 1)^2

    Args:
        state: The calibration, whose rule is `Plus`. The gammas that it has stay.
        trust: Task -> trust in its samples. The samples of missing tasks count in full.
    """
    rule: Any = state.rule
    gammas = dict[str, float]()
    for task in state.streams.tasks:
        familiar = min(max(trust.get(task, FAMILIAR) / FAMILIAR, LEAST), 1.0)
        lack = max(ENOUGH_SAMPLES / state.streams.num_augmented_samples(task), 1)
        gammas[task] = rule.gamma * lack / familiar**2
    return replace(state, rule=replace(rule, gammas=gammas | rule.gammas))


def measured_trust(
    state: CalibrationState, block: str, groups: Sequence[Group]
) -> dict[str, float]:
    """Return trust in the samples of each task, none if it cannot be measured, and log it.

    Warnings name tasks whose samples were exchanged.

    Args:
        state: The calibration.
        block: The first block of a stage, which all samples have reached.
        groups: Its groups.
    """
    tasks, trust, exchanged = state.tasks, dict[str, float](), dict[str, str]()
    if len(tasks) > 1 and (measured := likenesses(state, block, groups)) is not None:
        likeness, alike = measured
        trust = dict(zip(tasks, trust_of(likeness, alike).tolist(), strict=True))
        exchanged = {tasks[k]: tasks[other] for k, other in exchanged_tasks(likeness).items()}
    for task, value in trust.items():
        state.log.add("trust", {"task": task, "trust": value, "fits": exchanged.get(task)})
    for task, doubt in exchanged_samples(state.log.records).items():
        logger.warning("task %s: %s Check the data of both", task, doubt)
    return trust


@exact_products()
def likenesses(
    state: CalibrationState, block: str, groups: Sequence[Group]
) -> tuple[Tensor, Tensor] | None:
    """Return `c` and the mean of `cos_F(P_i, P_j)` over j, as for `trust_of`, or None.

    They are measured at the inputs of the first linear modules of a block. None is returned if
    there are none, or no base.

    With `P_i = tau_i' tau_i` all products are `<P_i, G>`, and the sum of all `P_j / |P_j|` takes
    the place of G for their mean. So no process needs the experts of another one. The `P_i` of its
    own tasks stay in memory. They are no larger than the samples if a task has as many positions
    as the inputs have dimensions.
    """
    linear = (group for group in groups if group.kind == "linear" and not group.convolves)
    group, streams, processes = next(linear, None), state.streams, state.processes
    if group is None or state.base is None:
        return None
    base = group.linear(state.base.tensor, torch.float32).weight
    squares, total = dict[str, Tensor](), base.new_zeros(group.inputs, group.inputs)
    for task in streams.tasks:
        square = gram_of(step_of(state, group, task, base))
        square.div_(square.norm().clamp_min(torch.finfo(square.dtype).tiny))
        total.add_(square)
        squares[task] = square
    processes.add_up([total])
    rows = {task: list[Tensor]() for task in streams.tasks}
    for number in range(-1, len(state.tasks)):
        moment = total if number < 0 else moment_of(state, block, group, number, total)
        for task, row in rows.items():
            row.append((squares[task] * moment).sum())
    all_moments = processes.gather_dict(
        {task: torch.stack(row).tolist() for task, row in rows.items()}
    )
    table = torch.tensor([all_moments[task] for task in state.tasks], dtype=torch.float64)
    return table[:, 1:], table[:, 0] / len(table)


def step_of(state: CalibrationState, group: Group, task: str, base: Tensor) -> Tensor:
    """Return a task's `tau`, scaled to a largest entry of 1, which prevents overflow."""
    with state.experts[task].loaded(group.parameters) as expert:
        tau = group.linear(expert.get_parameter, torch.float32).weight.sub_(base)
    return tau.div_(tau.abs().amax().clamp_min(torch.finfo(tau.dtype).tiny))


def moment_of(
    state: CalibrationState, block: str, group: Group, number: int, moment: Tensor
) -> Tensor:
    """Return the second moment of a task's inputs, scaled to norm 1, in each process.

    Args:
        state: The calibration.
        block: The block.
        group: The modules that receive the inputs.
        number: The task's number.
        moment: Overwritten by the result.
    """
    streams, task = state.streams, state.tasks[number]
    if task in streams.tasks:
        shapes = (0, group.inputs), (group.inputs,), (0,), ()
        sums = Moments(moment.zero_(), *map(moment.new_zeros, shapes))
        for batch in streams.iter_batches(task):
            x = streams.inputs_of(task, batch, block, [group])[group.name]
            with group.place(block, task):
                for _, rows, _ in paired_features(batch, group, x):
                    sums.add(rows)
        sums.mirrored()
        moment.div_(moment.norm().clamp_min(torch.finfo(moment.dtype).tiny))
    state.processes.gather(None)  # a process that has ended is noticed here
    state.processes.broadcast(moment, number % state.processes.size)
    return moment


def trust_of(likeness: Tensor, alike: Tensor) -> Tensor:
    """Return trust in each task's samples, `[tasks]`.

    With `P_i = tau_i' tau_i`, `tau_i = W_i - W_base`, and `G_j` the second moment of task j's
    inputs,

        c_ij    = cos_F(P_i, G_j)
        trust_i = (c_ii - mean_j c_ij) / (c_ii (1 - mean_j cos_F(P_i, P_j)))

    It is 0 if an expert fits its samples no better than other tasks' samples.

    Args:
        likeness: `c`, `[tasks, tasks]`.
        alike: The means over j of `cos_F(P_i, P_j)`, `[tasks]`.
    """
    own_similarity = likeness.diagonal()
    return (own_similarity - likeness.mean(-1)) / (own_similarity * (1 - alike)).clamp_min(1e-12)


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
