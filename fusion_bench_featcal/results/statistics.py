"""Differences between methods with 95 % intervals: over test examples, and over seeds.

Two methods answer the same examples, so their flags are paired. Each interval has its observed
value in the middle. Two examples are added, of which each method alone answers one (Bonett and
Price, 2012), in equal parts to all `T` tasks (Price and Bonett, 2004). They change a task's mean
difference `d` by `s`, and `v` is the variance of the changed mean. The average over tasks has the
interval

    mean(d) ± (1.96 sqrt(sum v) / T + |sum s| / T)

Its last term puts the observed value into the middle of an interval that contains the published
one. Values of one method have two right and two wrong examples more (Agresti and Coull, 1998).
From three seeds on, Student's interval over the seeds is added: the first term becomes the root of
the sum of squares of both. `benchmarks/interval_coverage.py` computes how often intervals hold.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusion_bench_featcal.errors import ReportError

from .columns import AVERAGE

LEVEL = 0.95
NORMAL = 1.959964  # quantile of the normal distribution for 95 %
LEAST_SEEDS = 3
"""Smallest number of seeds with an interval. Student's interval of two is 12.7 standard errors."""
ADDED_DIFFERENCES, _ADDED_FLAGS = {-1.0: 1.0, 1.0: 1.0}, {0.0: 2.0, 1.0: 2.0}
"""Value -> number of examples of this value that are added to differences of flags, or to flags."""

BySeed = Mapping[Any, Mapping[str, NDArray[Any]]]
"""Seed -> task -> flags per test example `[examples]`, or one value `[1]` of a whole test set. The
seed is None for a model without randomness."""


@dataclass(frozen=True)
class Difference:
    """Average over tasks of one model minus the average of another.

    Attributes:
        value: The mean over common seeds.
        half: Half of its 95 % interval, or None with two seeds, or one seed without flags. NaN if
            an example's difference is not finite.
        seeds: Number of common seeds.
        p: Two-sided p-value, or None without an interval.
    """

    value: float
    half: float | None
    seeds: int
    p: float | None

    @property
    def negated(self) -> "Difference":
        """The difference in the other direction."""
        return replace(self, value=-self.value)

    def is_above(self, least: float = 0.0) -> bool:
        """Return whether value and interval are above 0, the value by the least, or it is NaN."""
        return not self.value <= max(math.inf if self.half is None else self.half, least)

    def is_below(self, least: float = 0.0) -> bool:
        """Return whether value and interval are below 0, the value by the least."""
        return self.value < -max(math.inf if self.half is None else self.half, least)


def mean_difference(differences: NDArray[Any]) -> Difference:
    """Return the mean of one difference per example, `[examples]`, with Student's interval.

    A single example has no interval.
    """
    half, p = student(differences) if len(differences) > 1 else (None, None)
    return Difference(float(np.mean(differences)), half, 1, p)


def difference(row: BySeed, other: BySeed) -> Difference | None:
    """Compare two models over the seeds that both have, or return None without a common seed.

    The p-value is normal with the interval's standard error. It is at least the p-value of a t test
    over seeds, and that of a sign test in which all examples that distinguish the models favour the
    same model.

    Raises:
        ReportError: If the models have different tasks or test examples.
    """
    seeds = common_seeds(row, other)
    if not seeds:
        return None
    sides = ([side[s if s in side else None] for s in seeds] for side in (row, other))
    gains = _paired_differences(*sides)
    value, count = float(np.mean([gain.mean() for gain in gains])), len(seeds)
    half, p_seeds = _interval(gains, ADDED_DIFFERENCES)
    if count == 2 or half is None:
        return Difference(value, None, count, None)
    items = [gain.mean(axis=0) for gain in gains]
    differing = sum(int((abs(item) > 1e-12).sum()) for item in items)
    p_sign = min(1.0, 2.0 ** (1 - differing)) if items[0].size > 1 else 0.0
    return Difference(value, half, count, max(normal_p(value, half), p_seeds, p_sign))


def normal_p(value: float, half: float) -> float:
    """Return the two-sided p-value of a normal estimate with half of its 95 % interval."""
    return math.erfc(abs(value) / (half / NORMAL) / math.sqrt(2)) if half else float(value == 0)


def _interval(
    values: Sequence[NDArray[Any]], added: Mapping[float, float]
) -> tuple[float | None, float]:
    """Return half of the 95 % interval of the average over tasks, and the p-value over seeds.

    Args:
        values: For each task `[seeds, examples]`, or `[seeds, 1]` of a whole test set.
        added: Value -> number of added examples of this value, which all tasks share equally.
    """
    seeds, has_items = len(values[0]), all(value.shape[1] > 1 for value in values)
    if not has_items and seeds < LEAST_SEEDS:
        return None, 0.0
    items = [value.mean(axis=0) for value in values] if has_items else []
    part = {value: count / len(values) for value, count in added.items()}
    moments = [_extended_mean(item, part) for item in items]
    half = NORMAL * math.sqrt(sum(variance for variance, _ in moments)) / len(values)
    p_seeds = 0.0
    if seeds >= LEAST_SEEDS:
        seed_interval, p_seeds = student(np.mean([value.mean(axis=1) for value in values], axis=0))
        half = math.hypot(half, seed_interval)
    return half + abs(sum(shift for _, shift in moments)) / len(values), p_seeds


def _extended_mean(items: NDArray[Any], added: Mapping[float, float]) -> tuple[float, float]:
    """Return the variance of the mean after examples are added, and the change of the mean."""
    values = np.append(items, [*added])
    weights = np.append(np.ones(items.size), [*added.values()])
    mean = np.average(values, weights=weights)
    variance = np.average((values - mean) ** 2, weights=weights) / weights.sum()
    return float(variance), float(mean - items.mean())


def halves(row: BySeed) -> dict[str, float]:
    """Return task (and `average`) -> half of the 95 % interval of its value.

    The interval is over test examples, if there are flags, and from three seeds on over seeds.
    Tasks with neither are missing.
    """
    draws = list(row.values())
    shared = [task for task in draws[0] if len({len(draw.get(task, ())) for draw in draws}) == 1]
    values = {task: np.stack([draw[task] for draw in draws]).astype(float) for task in shared}
    parts = {task: [value] for task, value in values.items()}
    parts |= {AVERAGE: [*values.values()]} if values else {}
    intervals = {name: _interval(part, _ADDED_FLAGS)[0] for name, part in parts.items()}
    return {name: half for name, half in intervals.items() if half is not None}


def common_seeds(row: BySeed, other: BySeed) -> list[object]:
    """Return common seeds of two models. One without randomness fits every seed of the other."""
    seeds = {*row} & {*other} or {*(other if None in row else row if None in other else ())}
    return sorted(seeds, key=str)


def student(values: Sequence[float] | NDArray[Any]) -> tuple[float, float]:
    """Return half of Student's 95 % interval of the mean of draws, and the p-value of its t test.

    `values` are two or more draws.
    """
    from scipy import stats  # slow to import

    count, mean = len(values), float(np.mean(values))
    error = math.sqrt(float(np.var(values, ddof=1)) / count)
    half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, count - 1)) if error else float(mean == 0)
    return half, p


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, in the same order (Holm, 1979)."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted


def _paired_differences(ones: Sequence[Any], partners: Sequence[Any]) -> list[NDArray[np.float64]]:
    """Return differences `[seeds, examples]` for each task."""
    gains = []
    for task in ones[0]:
        sizes = {len(side.get(task, ())) for side in (*ones, *partners)}
        if len(sizes) > 1 or any(side.keys() != ones[0].keys() for side in (*ones, *partners)):
            raise ReportError(
                f"task '{task}': models with {' and '.join(map(str, sorted(sizes)))} test examples "
                "or with different tasks cannot be compared"
            )
        sides = (np.stack([side[task] for side in part]).astype(float) for part in (ones, partners))
        gains.append(next(sides) - next(sides))
    return gains
