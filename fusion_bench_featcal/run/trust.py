"""Agreement of samples and experts (trust), which sets the weight of the task-vector rows."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.products import gram_of
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.run.log import UNLIKE_SAMPLES, exchanged_samples
from fusion_bench_featcal.run.state import CalibrationState
from fusion_bench_featcal.streams.task_sums import paired_features

logger = logging.getLogger(__name__)

ENOUGH_SAMPLES = 64
"""Number of a task's samples, with augmented ones, below which task-vector rows weigh more."""

FAMILIAR, LEAST = 0.3, 1 / 4
"""Trust from which samples count in full, and the lower bound of trust divided by it."""

UNLIKE = 0.1
"""Agreement below which samples fit no task. It was chosen on the bundled CLIP and T5 and on
MiniLM. On ten suites right samples have at least 0.13, also in fog and noise and with four samples
of each task. Samples of no task, of one task for all, of the next task for each, and one mix for
all have at most 0.03 (benchmarks/results/unlike_samples.md)."""

MARGIN = 1.15
"""Ratio of similarities from which samples count as exchanged. Right samples stay below 1.08."""


@dataclass(frozen=True)
class Trust:
    """Agreement of samples and experts.

    Attributes:
        by_task: Task -> trust in its samples. Samples of missing tasks are trusted in full.
        is_refuted: Whether the samples fit no task, so that only task vectors may change weights.
    """

    by_task: Mapping[str, float] = field(default_factory=dict)
    is_refuted: bool = False


def with_trust(state: CalibrationState, trust: Trust) -> CalibrationState:
    """Return the state with a rule that has a `gamma` and a lack of samples for each task.

    With `k_i`, the number of all samples of a task, including augmented samples and samples that
    do not run a tower,

        lack_i  = max(64 / k_i, 1)
        gamma_i = gamma lack_i / min(max(trust_i / 0.3, 1/4), 1)^2

    Steps of convolutions have the scale `min(n_i / 64, 1)^(1/2)`, where `n_i` does not include
    augmented samples.

    If the samples fit no task, the rule becomes one of task vectors only, and each task has the
    `gamma` of many samples without trust. Samples that say nothing give no task more weight.

    Args:
        state: The calibration, whose rule is `Plus`. Values in the rule's mappings have priority.
        trust: The trust in its samples.
    """
    rule: Any = state.rule
    only = trust.is_refuted or rule.task_vectors_only
    gammas, lacks, scales = dict[str, float](), dict[str, float](), dict[str, float]()
    streams, counts = state.streams, dict[tuple[str, str], int]()
    for task in streams.tasks:
        counts[task, "samples"] = streams.num_samples(task)
        counts[task, "augmented"] = sum(batch.samples for batch in streams.tasks[task])
    counts = state.processes.sum_counts(counts)
    for task in dict.fromkeys(task for task, _ in counts):
        familiar = min(max(trust.by_task.get(task, FAMILIAR) / FAMILIAR, LEAST), 1.0)
        lacks[task] = max(ENOUGH_SAMPLES / counts[task, "augmented"], 1)
        if only:
            familiar, lacks[task] = LEAST, 1
        gammas[task] = rule.gamma * lacks[task] / familiar**2
        scales[task] = min(counts[task, "samples"] / ENOUGH_SAMPLES, 1) ** 0.5
    by_task = {
        "gammas": gammas | rule.gammas,
        "lacks": lacks | rule.lacks,
        "convolution_scales": scales | rule.convolution_scales,
    }
    rule = replace(rule, **by_task, task_vectors_only=only)
    return replace(state, rule=rule)


def measure_trust(state: CalibrationState, block: str, groups: Sequence[Group]) -> Trust:
    """Return and log the trust in the samples, which is empty if it cannot be measured.

    Warnings name tasks whose samples were exchanged, and samples that fit no task.

    Args:
        state: The calibration.
        block: The first block of a stage, which all samples have reached.
        groups: Its groups.
    """
    tasks = state.tasks
    measured = measure_similarities(state, block, groups) if len(tasks) > 1 else None
    if measured is None:
        return Trust()
    similarity, overlaps = measured
    by_task = dict(zip(tasks, trust_of(similarity, overlaps).tolist(), strict=True))
    rule: Any = state.rule
    agreement = agreement_of(similarity, overlaps)
    is_refuted = agreement < UNLIKE and rule.task_vectors_only is None
    exchanged = {tasks[k]: tasks[other] for k, other in exchanged_tasks(similarity).items()}
    for task, value in by_task.items():
        state.log.add("trust", {"task": task, "trust": value, "fits": exchanged.get(task)})
    state.log.add("agreement", {"agreement": agreement, "refuted": is_refuted})
    for task, warning in exchanged_samples(state.log.records).items():
        logger.warning("task %s: %s Check the data of both", task, warning)
    if is_refuted:
        logger.warning(UNLIKE_SAMPLES)
    return Trust(by_task, is_refuted)


@exact_products()
def measure_similarities(
    state: CalibrationState, block: str, groups: Sequence[Group]
) -> tuple[Tensor, Tensor] | None:
    """Return the arguments of `trust_of`: `c`, and the mean of `cos_F(P_i, P_j)` over j.

    They are measured at the inputs of the first linear modules of the block in which every expert
    differs from the base. The result is None if the block has none.

    The products `<P_i, G>` are needed for each `G_j`, and for `G = sum_j P_j / |P_j|`. Both are
    added up over the processes, so each process only reads the experts of its own tasks here. It
    keeps their `P_i` in memory, `[d, d]` each.
    """
    processes, base_model = state.processes, state.base
    own_tasks = processes.own_tasks(state.tasks)
    assert base_model is not None  # without a base, trust is not measured
    for group in (group for group in groups if group.kind == "linear" and not group.convolves):
        base = group.stack_weights(base_model.tensor, torch.float32).weight
        squares = {t: gram_of(task_vector_of(state, group, t, base)) for t in own_tasks}
        if all(processes.gather(all(square.any() for square in squares.values()))):
            break
    else:
        return None
    total = base.new_zeros(group.in_features, group.in_features)
    for square in squares.values():
        total.add_(square.div_(square.norm()))
    processes.all_reduce_sum([total])
    rows = {task: list[Tensor]() for task in own_tasks}
    for other in (None, *state.tasks):
        moment = total if other is None else second_moment(state, block, group, other, total)
        for task, row in rows.items():
            row.append((squares[task] * moment).sum())
    own_rows = {task: torch.stack(row).tolist() for task, row in rows.items()}
    all_rows = processes.gather_dict(own_rows)
    table = torch.tensor([all_rows[task] for task in state.tasks], dtype=torch.float64)
    return table[:, 1:], table[:, 0] / len(table)


def task_vector_of(state: CalibrationState, group: Group, task: str, base: Tensor) -> Tensor:
    """Return a task's `tau`, scaled to a largest entry of 1, which prevents overflow."""
    with state.experts[task].loaded(group.parameters) as expert:
        tau = group.stack_weights(expert.get_parameter, torch.float32).weight.sub_(base)
    return tau.div_(tau.abs().amax().clamp_min(torch.finfo(tau.dtype).tiny))


def second_moment(
    state: CalibrationState, block: str, group: Group, task: str, moment: Tensor
) -> Tensor:
    """Return the second moment of a task's inputs, scaled to norm 1, in each process.

    Args:
        state: The calibration.
        block: The block.
        group: The modules that receive the inputs.
        task: The task.
        moment: Overwritten with the result.
    """
    streams, shapes = state.streams, ((0, group.in_features), (group.in_features,), (0,), ())
    sums = Moments(moment.zero_(), *map(moment.new_zeros, shapes))
    for batch in streams.iter_batches(task):
        x = streams.inputs_of(task, batch, block, [group])[group.name]
        with group.place(block, task):
            for _, rows, _ in paired_features(batch, group, x):
                sums.add(rows)
    sums.mirrored()
    state.processes.all_reduce_sum([moment])
    return moment.div_(moment.norm().clamp_min(torch.finfo(moment.dtype).tiny))


def trust_of(similarity: Tensor, overlaps: Tensor) -> Tensor:
    """Return trust in each task's samples, `[tasks]`.

    With `P_i = tau_i' tau_i`, `tau_i = W_i - W_base`, and `G_j` the second moment of task j's
    inputs,

        c_ij    = cos_F(P_i, G_j)
        trust_i = (c_ii - mean_j c_ij) / (c_ii (1 - mean_j cos_F(P_i, P_j)))

    It is 0 if an expert fits its samples no better than other tasks' samples.

    Args:
        similarity: `c`, `[tasks, tasks]`.
        overlaps: The means over j of `cos_F(P_i, P_j)`, `[tasks]`.
    """
    own = similarity.diagonal()
    return (own - similarity.mean(-1)) / (own * (1 - overlaps)).clamp_min(1e-12)


def agreement_of(similarity: Tensor, overlaps: Tensor) -> float:
    """Return how much better the experts fit their own samples than other tasks' samples.

        a = (mean_i log c_ii - mean_ij log c_ij) / (1 - mean_ij cos_F(P_i, P_j))

    Factors of an expert's row or a task's column of `c` cancel, so an expert that fits everything,
    and samples that everything fits, count for nothing. It is 0 for samples without any relation to
    the tasks, or of one task for all, and negative for exchanged ones.

    The arguments are those of `trust_of`.
    """
    logs = similarity.clamp_min(torch.finfo(torch.float32).tiny).log()
    excess = logs.diagonal().mean() - logs.mean()
    return float(excess / (1 - overlaps.mean()).clamp_min(1e-12))


def exchanged_tasks(similarity: Tensor) -> dict[int, int]:
    """Assign to each expert the samples that fit best overall, and return the changes.

    The result is a mapping from an expert's task to the task whose samples fit it. It is empty
    unless the assignment is better by `MARGIN` over the tasks that it changes, and if it changes
    all tasks, such as both of two: then no task confirms that experts and samples can be compared.
    The argument is that of `trust_of`.
    """
    from scipy.optimize import linear_sum_assignment

    table = similarity.double().numpy()
    _, best = linear_sum_assignment(table, maximize=True)
    changed = [(k, int(other)) for k, other in enumerate(best) if k != other]
    assigned, better = sum(table[k, k] for k, _ in changed), sum(table[c] for c in changed)
    some = len(changed) < len(best)
    return dict(changed) if some and better > MARGIN * assigned else {}
