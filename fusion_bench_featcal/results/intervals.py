"""Intervals of 95 % by a paired bootstrap over test items, Student's t over seeds, or both.

Rows answer the same items, so each resample draws items once and uses them for all rows. Items are
drawn within each task and the tasks' means are averaged, as the report's average does. With several
seeds, an item counts with its mean over the seeds.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusion_bench_featcal.files import ReportError

RESAMPLES = 10_000
LEVEL = 0.95
BOOTSTRAP_SEED = 0
_MOST_DRAWN = 2**24  # largest number of counts drawn at once

ITEMS, SEEDS, ITEMS_AND_SEEDS, SUITES, ROWS, VALUES = (
    "test items", "seeds", "test items and seeds", "suites", "rows", "values of a label",
)  # fmt: skip

Scores = Mapping[str, Any]
"""Task -> flags per test item, `[items]`, or `[seeds, items]` for several calibration seeds."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval, in the unit of accuracy (0..1) or as a share.

    Attributes:
        estimate: The estimate.
        low: Lower end of the interval.
        high: Upper end.
        over: Source of the variation. For `ITEMS` the interval comes from the paired bootstrap. For
            `ITEMS_AND_SEEDS` the half-widths of both are combined as the root of the sum of
            squares. For all others it is Student's. Empty for a single value, which has no
            interval.
    """

    estimate: float
    low: float
    high: float
    over: str = ""

    @classmethod
    def of(cls, value: float) -> "Interval":
        """Return a single value."""
        return cls(value, value, value)

    @property
    def half(self) -> float:
        """Half of the width."""
        return (self.high - self.low) / 2

    def scaled(self, unit: float) -> "Interval":
        """Return the interval in another unit, such as 100 for per cent."""
        return Interval(unit * self.estimate, unit * self.low, unit * self.high, self.over)

    def around(self, value: float) -> "Interval":
        """Return an interval of the same width around another estimate."""
        low, high = (value + end - self.estimate for end in (self.low, self.high))
        return Interval(value, low, high, self.over)

    def limits(self, form: str = "+z.1f") -> str:
        """Write the ends in per cent or points."""
        return f"[{100 * self.low:{form}}, {100 * self.high:{form}}]"

    def text(self, form: str = ".1f", unit: float = 100) -> str:
        """Write the estimate and, if there is an interval, half of its width."""
        mean = f"{unit * self.estimate:{form}}"
        return f"{mean} ± {unit * self.half:{form.lstrip('+z')}}" if self.over else mean


def student_interval(values: Sequence[float] | NDArray[Any], over: str) -> Interval:
    """Return the mean of draws with Student's interval. A single value has no interval."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return interval_of_mean(float(np.mean(values)), deviation, len(values), over)


def interval_of_mean(
    mean: float, deviation: float | None, draws: int, over: str = SEEDS
) -> Interval:
    """Return Student's interval of a mean, from the draws' standard deviation (n - 1)."""
    if deviation is None or draws < 2:
        return Interval.of(mean)
    from scipy import stats  # slow to import

    half = float(stats.t.ppf((1 + LEVEL) / 2, draws - 1)) * deviation / math.sqrt(draws)
    return Interval(mean, mean - half, mean + half, over)


def over_seeds(
    estimate: float, values: Sequence[float] | NDArray[Any], items: Interval | None
) -> Interval:
    """Return the interval of an estimate over seeds and test items together.

    The half-width is the root of the sum of squares of the half-width over seeds (Student's t) and
    the one over test items for the given seeds.

    Args:
        estimate: The mean over seeds.
        values: The estimate for each seed, such as the gains of a row over its merger.
        items: The interval over test items, or None if they are unknown.
    """
    seeds, low, high = student_interval(values, SEEDS), 0.0, 0.0
    if items is not None:
        low, high = items.estimate - items.low, items.high - items.estimate
    over = (ITEMS_AND_SEEDS if seeds.over else ITEMS) if items is not None else seeds.over
    low, high = math.hypot(low, seeds.half), math.hypot(high, seeds.half)
    return Interval(estimate, estimate - low, estimate + high, over)


def paired_difference(row: Scores, other: Scores, *, resamples: int = RESAMPLES) -> Interval:
    """Return accuracy of `row` minus accuracy of `other`, averaged over tasks."""
    gains = {task: gain[:, None] for task, gain in item_differences(row, other).items()}
    estimate, resampled = macro_means(gains, resamples)
    return bootstrap_interval(estimate[0], resampled[:, 0])


def recovered_gap_interval(row: Scores, merged: Scores, experts: Scores) -> Interval | None:
    """Return the share of the merged-to-expert gap that `row` recovers, averaged over tasks.

    One resample of items is used for all three rows. None if the gap is not positive, in the data
    or in any resample, since its share would be meaningless.
    """
    gains, gaps = item_differences(row, merged), item_differences(experts, merged)
    both = {task: np.stack([gains[task], gaps[task]], axis=1) for task in gains}
    estimate, resampled = macro_means(both)
    if estimate[1] <= 0 or resampled[:, 1].min() <= 0:
        return None
    return bootstrap_interval(estimate[0] / estimate[1], resampled[:, 0] / resampled[:, 1])


def item_differences(first: Scores, second: Scores) -> dict[str, NDArray[Any]]:
    """Return task -> `[items]`, the difference of the rows' means over seeds.

    Raises:
        ReportError: If the rows have different tasks or test items.
    """
    if set(first) != set(second) or not first:
        raise ReportError(
            f"rows are not about the same tasks: {sorted(first)} and {sorted(second)}"
        )
    differences = {}
    for task in first:
        one, two = item_scores(first[task]), item_scores(second[task])
        if one.shape != two.shape or one.size == 0:
            raise ReportError(
                f"task '{task}': rows have {one.size} and {two.size} test items, "
                "so they cannot be paired"
            )
        differences[task] = one - two
    return differences


def item_scores(flags: Any) -> NDArray[np.float64]:
    """Return the mean over seeds of each test item's flag, `[items]`."""
    return np.atleast_2d(np.asarray(flags, dtype=np.float64)).mean(axis=0)


def macro_means(
    columns: Mapping[str, NDArray[Any]], resamples: int = RESAMPLES
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Average over tasks of the columns' means over items, observed and resampled.

    Items with equal values are interchangeable, so the count of every distinct value is drawn
    instead of items (multinomial). This has the same distribution, without an array `[resamples,
    items]`. Each task has a separate generator, seeded by its name.

    Args:
        columns: Task -> `[items, k]`.
        resamples: Number of resamples.

    Returns:
        The observed means, `[k]`, and the resampled ones, `[resamples, k]`.
    """
    observed = resampled = np.zeros(1)
    for task in sorted(columns):
        # Rounding off the last bits keeps equal scores equal for any order of summation.
        values, counts = np.unique(np.round(columns[task], 12), axis=0, return_counts=True)
        items = counts.sum()
        generator = np.random.default_rng([BOOTSTRAP_SEED, _number(task)])
        size = max(1, _MOST_DRAWN // len(counts))
        resampled_parts = [
            generator.multinomial(items, counts / items, size=min(size, resamples - start)) @ values
            for start in range(0, resamples, size)
        ]
        observed = observed + counts @ values / items
        resampled = resampled + np.concatenate(resampled_parts) / items
    return observed / len(columns), resampled / len(columns)


def _number(task: str) -> int:
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "big")


def bootstrap_interval(estimate: Any, resampled: NDArray[Any]) -> Interval:
    """Return the percentile interval over test items."""
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(estimate), float(low), float(high), ITEMS)
