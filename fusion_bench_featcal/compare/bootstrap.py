"""Paired bootstrap over test items: how sure is the difference between two rows?

Both rows answer the same items, so each resample draws items once and uses them for both; items
are drawn within each task and the tasks' means are averaged, as the report's average does. With
several seeds of calibration samples, an item counts with its mean over the seeds, and the interval
is about the test items, given those seeds.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import ReportError

RESAMPLES = 10_000
LEVEL = 0.95
BOOTSTRAP_SEED = 0

Scores = Mapping[str, Any]
"""Task -> flags per test item, `[items]`, or `[seeds, items]` for several calibration seeds."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its percentile interval, in the unit of accuracy (0..1) or as a share."""

    estimate: float
    low: float
    high: float


def paired_difference(
    row: Scores,
    other: Scores,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = BOOTSTRAP_SEED,
) -> Interval:
    """Accuracy of `row` minus that of `other`, averaged over tasks.

    Args:
        row: Task -> `[items]` or `[seeds, items]`.
        other: The same tasks and items; the number of seeds may differ.
        resamples: Number of resamples.
        level: Coverage of the interval, between 0 and 1.
        seed: Seed of the resampling; the order of tasks and items plays no part.

    Raises:
        ReportError: The rows are not about the same tasks and test items.
    """
    differences = {
        task: (first - second)[:, None] for task, (first, second) in _paired(row, other).items()
    }
    estimate, resampled = _macro_means(differences, resamples, seed)
    low, high = _percentiles(resampled[:, 0], level)
    return Interval(float(estimate[0]), low, high)


def recovered_gap_interval(
    row: Scores,
    merged: Scores,
    experts: Scores,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = BOOTSTRAP_SEED,
) -> Interval | None:
    """Share of the merged-to-expert gap that `row` recovers on the average over tasks.

    Args:
        row: Task -> `[items]` or `[seeds, items]`; likewise `merged` and `experts`.
        merged: The upstream merger's row.
        experts: Each task's own expert.
        resamples: Number of resamples; one resample of items serves all three rows.
        level: Coverage of the interval, between 0 and 1.
        seed: Seed of the resampling.

    Returns:
        None where the gap is not positive, in the data or in any resample: a share of it would
        mean nothing.

    Raises:
        ReportError: The rows are not about the same tasks and test items.
    """
    gains = {task: first - second for task, (first, second) in _paired(row, merged).items()}
    gaps = {task: first - second for task, (first, second) in _paired(experts, merged).items()}
    both = {task: np.stack([gains[task], gaps[task]], axis=1) for task in gains}
    estimate, resampled = _macro_means(both, resamples, seed)
    if estimate[1] <= 0 or resampled[:, 1].min() <= 0:
        return None
    low, high = _percentiles(resampled[:, 0] / resampled[:, 1], level)
    return Interval(float(estimate[0] / estimate[1]), low, high)


def _paired(first: Scores, second: Scores) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Mean over seeds of both rows, `[items]` each, task by task."""
    if set(first) != set(second) or not first:
        raise ReportError(
            f"rows are not about the same tasks: {sorted(first)} and {sorted(second)}"
        )
    pairs = {}
    for task in first:
        one, two = _item_scores(first[task]), _item_scores(second[task])
        if one.shape != two.shape or one.size == 0:
            raise ReportError(
                f"task '{task}': rows have {one.size} and {two.size} test items, "
                "so they cannot be paired"
            )
        pairs[task] = (one, two)
    return pairs


def _item_scores(flags: Any) -> NDArray[np.float64]:
    scores = np.asarray(flags, dtype=np.float64)
    return scores.mean(axis=0) if scores.ndim == 2 else scores


def _macro_means(
    columns: Mapping[str, NDArray[Any]], resamples: int, seed: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Average over tasks of the columns' means over items, as observed and resampled.

    Items with equal values are interchangeable, so instead of drawing items the count of every
    distinct value is drawn (multinomial): the same distribution, without `[resamples, items]`.

    Args:
        columns: Task -> `[items, k]`.
        resamples: Number of resamples.
        seed: Seed; each task has a generator of its own, derived from its name.

    Returns:
        The observed means `[k]` and the resampled ones `[resamples, k]`.
    """
    observed: NDArray[Any] = np.zeros(1)
    resampled: NDArray[Any] = np.zeros(1)
    for task in sorted(columns):
        # Rounding off the last bits keeps equal scores equal whatever order they were summed in.
        values, counts = np.unique(np.round(columns[task], 12), axis=0, return_counts=True)
        items = counts.sum()
        generator = np.random.default_rng([seed, _number(task)])
        drawn = generator.multinomial(items, counts / items, size=resamples)
        observed = observed + counts @ values / items
        resampled = resampled + drawn @ values / items
    return observed / len(columns), resampled / len(columns)


def _number(task: str) -> int:
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "big")


def _percentiles(values: NDArray[Any], level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
