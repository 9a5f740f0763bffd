"""Weights of tasks by the distance of each from its expert, measured in a first calibration."""

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from fusion_bench_featcal.run.blocks import calibrate_blocks
from fusion_bench_featcal.run.checkpoint import NoCheckpoint
from fusion_bench_featcal.run.log import CalibrationLog, distances
from fusion_bench_featcal.run.state import CalibrationState

MOST = 16.0
"""Largest factor of a task's weight. The smallest is its inverse."""


def with_balanced_tasks(state: CalibrationState) -> CalibrationState:
    """Return the calibration with larger weights of tasks that end far from their experts.

    A first calibration of all blocks measures the distances, and only the factors of the weights
    are kept. A resumed run reads the factors that its finished blocks were calibrated with.

    Args:
        state: The calibration before its first block, whose rule is `Plus`.
    """
    rule: Any = state.rule
    if not rule.balance:
        return state
    if earlier := state.checkpoint.finished_records("balance"):
        factors = earlier[0]["factors"]
    else:
        unbalanced, log = replace(rule, balance=0.0), CalibrationLog()
        streams = state.streams.restarted()
        calibrate_blocks(
            replace(state, rule=unbalanced, streams=streams, checkpoint=NoCheckpoint(), log=log)
        )
        measured = distances(log.records)
        factors = balance_factors(measured, rule.balance)
        state.log.add("balance", {"distances": measured, "factors": factors})
    weights = dict(rule.task_weights)
    weights |= {task: weights.get(task, 1.0) * factor for task, factor in factors.items()}
    return replace(state, rule=replace(rule, task_weights=weights, balance=0.0))


def balance_factors(measured: Mapping[str, float], power: float) -> dict[str, float]:
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
