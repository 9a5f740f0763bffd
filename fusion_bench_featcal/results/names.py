"""Row names that mean the same in every report, and the measures they define."""

import math
from collections.abc import Mapping

BASE = "base"
EXPERTS = "experts"
FEATCAL = "featcal"
AVERAGE = "average"
LEAST_GAP = 0.01
"""Smallest merged-to-expert gap of a task of which a share is compared: one point."""
NORMALISED = "normalised"
UNAVAILABLE = "unavailable"


def recovered_share(value: float, merged: float, expert: float) -> float | None:
    """Share of the gap between merged and expert that `value` closes; None if there is no gap."""
    gap = expert - merged
    return (value - merged) / gap if gap > 0 else None


def worst_task(
    row: Mapping[str, float],
    merged: Mapping[str, float] | None,
    experts: Mapping[str, float] | None,
) -> tuple[str, float | None] | None:
    """The task that gained least over the merged model.

    Args:
        row: Task (and `average`, which is left out) -> accuracy.
        merged: The same of the merged model; None: there is none to compare with.
        experts: The same of the experts, each on its own task; None: not evaluated.

    Returns:
        The task with the smallest share of its gap recovered, and that share. Only tasks with a gap
        of at least `LEAST_GAP` count; without any, the task with the smallest gain, and None.
    """
    tasks = [task for task in row if task != AVERAGE]
    if merged is None or not tasks:
        return None
    if experts is not None:
        shares = {
            task: (row[task] - merged[task]) / (experts[task] - merged[task])
            for task in tasks
            if experts[task] - merged[task] >= LEAST_GAP
        }
        if shares:
            worst = min(shares, key=shares.__getitem__)
            return worst, shares[worst]
    return min(tasks, key=lambda task: row[task] - merged[task]), None


def normalised_average(
    row: Mapping[str, float], experts: Mapping[str, float] | None
) -> float | None:
    """Mean over tasks of accuracy divided by the task's expert's; None without experts.

    Args:
        row: Task (and `average`, which is left out) -> accuracy.
        experts: The same of the experts.
    """
    tasks = [task for task in row if task != AVERAGE]
    if experts is None or any(experts[task] <= 0 for task in tasks):
        return None
    return math.fsum(row[task] / experts[task] for task in tasks) / len(tasks)
