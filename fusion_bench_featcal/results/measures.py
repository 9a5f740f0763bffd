"""Measures of a row of accuracies against the merged model and the experts."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from .long_table import AVERAGE, LEAST_GAP, Row


def samples_range(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return samples per task and their splits, such as `256` and `train`, or nothing."""
    used = list(entries)
    if not used:
        return []
    counts = sorted({int(entry["samples"]) for entry in used})
    splits = sorted({str(entry["split"]) for entry in used})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return [number, " and ".join(splits)]


def mean(row: Row) -> float:
    """Return the mean over a row's tasks. The row must not contain the average."""
    return math.fsum(row.values()) / len(row)


def recovered_share(value: float, merged: float, expert: float) -> float | None:
    """Return the share of the merged-to-expert gap that `value` closes, or None without a gap."""
    gap = expert - merged
    return (value - merged) / gap if gap > 0 else None


def worst_task(
    row: Row, merged: Row | None, experts: Row | None
) -> tuple[str, float | None] | None:
    """Return the task with the smallest share of its merged-to-expert gap recovered, and the share.

    Only tasks with a gap of at least `LEAST_GAP` count. Without any, or without experts, return the
    task with the smallest gain over the merged model, and None. Without merged model return None.
    """
    tasks = [task for task in row if task != AVERAGE]
    if merged is None or not tasks:
        return None
    gaps = {task: experts[task] - merged[task] for task in tasks} if experts is not None else {}
    shares = {
        task: (row[task] - merged[task]) / gap for task, gap in gaps.items() if gap >= LEAST_GAP
    }
    if not shares:
        return min(tasks, key=lambda task: row[task] - merged[task]), None
    worst = min(shares, key=shares.__getitem__)
    return worst, shares[worst]


def normalised_average(row: Row, experts: Row | None) -> float | None:
    """Return the mean over tasks of accuracy divided by the expert's, or None without experts."""
    tasks = [task for task in row if task != AVERAGE]
    if experts is None or any(experts[task] <= 0 for task in tasks):
        return None
    return math.fsum(row[task] / experts[task] for task in tasks) / len(tasks)
