"""Weights of tasks by the distance of each from its expert, measured in a first calibration."""

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from fusion_bench_featcal.run.blocks import calibrate_blocks
from fusion_bench_featcal.run.checkpoint import Trial
from fusion_bench_featcal.run.log import CalibrationLog, distances
from fusion_bench_featcal.run.problem import Problem

MOST = 16.0
"""Largest factor of a task's weight. The smallest is its inverse."""


def balanced(problem: Problem) -> Problem:
    """Return the problem with larger weights of tasks that end far from their experts.

    All blocks are calibrated once, of which nothing is kept but the factors. A resumed run has
    those that its finished blocks were calibrated with.

    Args:
        problem: The problem before its first block, whose rule is `Plus`.
    """
    rule: Any = problem.rule
    if not rule.balance:
        return problem
    if earlier := problem.output.finished_records("balance"):
        factors = earlier[0]["factors"]
    else:
        once, log = replace(rule, balance=0.0), CalibrationLog()
        streams = problem.streams.again()
        calibrate_blocks(replace(problem, rule=once, streams=streams, output=Trial(), log=log))
        measured = distances(log.records)
        factors = factors_of(measured, rule.balance)
        problem.log.add("balance", {"distances": measured, "factors": factors})
    weights = dict(rule.task_weights)
    weights |= {task: weights.get(task, 1.0) * factor for task, factor in factors.items()}
    return replace(problem, rule=replace(rule, task_weights=weights, balance=0.0))


def factors_of(measured: Mapping[str, float], power: float) -> dict[str, float]:
    """Return factors of the tasks' weights, `(d_i / geometric mean of d)^power`.

    Args:
        measured: Task -> distance `d`. Tasks without a positive one are not weighted.
        power: 1 for weights in proportion to the distances.
    """
    logs = {task: math.log(d) for task, d in measured.items() if d > 0}
    mean = fmean(logs.values()) if logs else 0.0
    bound = math.log(MOST)
    return {
        task: math.exp(min(max(power * (log - mean), -bound), bound)) for task, log in logs.items()
    }
