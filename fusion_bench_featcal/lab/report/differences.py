"""Differences between rows, each with an interval and a corrected p-value."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.results.intervals import (
    LEVEL,
    SEEDS,
    SUITES,
    Interval,
    Scores,
    bootstrap_interval,
    item_differences,
    item_scores,
    macro_means,
    over_seeds,
    student_interval,
)
from fusion_bench_featcal.results.long_table import BASE, EXPERTS, RowKey
from fusion_bench_featcal.results.tables import Grid

WIN, TIE, LOSS = "above", "tie", "below"
INTERVAL_COLUMNS = ("points", "95 % interval", "p (Holm)")
_ROUNDING = 1e-12  # tolerance for averages
_NORMAL = NormalDist().inv_cdf((1 + LEVEL) / 2)

BySeed = Mapping[Any, Scores]
"""Seed -> flags of that run, `[items]`. The seed is None for a run without randomness."""


@dataclass(frozen=True)
class Difference:
    """Average accuracy of one row minus that of another.

    Attributes:
        row: The first row.
        other: The row to subtract.
        interval: The difference, on common test items over common seeds, or the mean over
            independently trained suites.
        p: Two-sided p-value, from `Bootstrap.difference` or, over suites, from a t test.
        adjusted: Corrected by Holm's method for all differences shown together.
        seeds: Seeds that both rows have.
        by_suite: Suite -> the difference, if it is over suites.
    """

    row: RowKey
    other: RowKey
    interval: Interval
    p: float
    adjusted: float = math.nan
    seeds: tuple[Any, ...] = ()
    by_suite: Mapping[str, float] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """`WIN` or `LOSS`, or `TIE` if the adjusted p-value is not below 1 - LEVEL."""
        if self.adjusted >= 1 - LEVEL:
            return TIE
        return WIN if self.interval.estimate > 0 else LOSS

    @property
    def cells(self) -> list[str]:
        """Cells for `INTERVAL_COLUMNS`."""
        value = f"{100 * self.interval.estimate:+z.1f}"
        return [value, self.interval.limits(), f"{self.adjusted:.2g}"]


class Bootstrap:
    """Average accuracies of several rows, observed and in common resamples of test items.

    Attributes:
        observed: `[rows]`.
        resampled: `[resamples, rows]`.
    """

    def __init__(self, rows: Sequence[Scores]) -> None:
        """Resample test items.

        Args:
            rows: Rows with common tasks and test items, each over separate seeds.

        Raises:
            ReportError: If tasks or test items differ.
        """
        for row in rows[1:]:
            item_differences(rows[0], row)
        self._columns = {
            task: np.stack([item_scores(row[task]) for row in rows], axis=1) for task in rows[0]
        }
        self.observed, self.resampled = macro_means(self._columns)
        self._by_seed = [
            np.mean([np.atleast_2d(flags).mean(axis=1) for flags in row.values()], axis=0)
            for row in rows
        ]

    def difference(self, first: int, second: int) -> tuple[Interval, float]:
        """Return the first row minus the second, with the same seeds, and the two-sided p-value.

        The interval comes from `over_seeds`. The p-value assumes a normal distribution with the
        interval's standard error, because the share of resamples beyond zero cannot be small enough
        for a correction over many pairs. It is at least the p-value of a t test over the seeds, and
        of a sign test in which all items that distinguish the rows favour the same one.
        """
        value = float(self.observed[first] - self.observed[second])
        resampled = self.resampled[:, first] - self.resampled[:, second]
        gains = self._by_seed[first] - self._by_seed[second]
        half = student_interval(gains, SEEDS).half
        error = math.hypot(float(resampled.std(ddof=1)), half / _NORMAL)
        if error < _ROUNDING:
            p = 1.0 if abs(value) < _ROUNDING else 0.0
        else:
            p = math.erfc(abs(value) / error / math.sqrt(2))
        if len(gains) > 1:
            p = max(p, _student_p(gains))
        sides = ((task[:, first], task[:, second]) for task in self._columns.values())
        differing = sum(int((abs(one - two) > _ROUNDING).sum()) for one, two in sides)
        p = max(p, min(1.0, 2.0 ** (1 - differing)))
        return over_seeds(value, gains, bootstrap_interval(value, resampled)), p


def _student_p(values: Sequence[float] | NDArray[Any]) -> float:
    """Return the two-sided p-value of a t test of the mean of several draws."""
    from scipy import stats  # slow to import

    mean, error = float(np.mean(values)), float(stats.sem(values))
    ratio = abs(mean) / error if error > 0 else (np.inf if mean else 0.0)
    return float(2 * stats.t.sf(ratio, len(values) - 1))


def common_seeds(one: BySeed, other: BySeed) -> tuple[Any, ...]:
    """Return common seeds of two rows. A run without randomness matches every seed of the other."""
    seeds = {*one} & {*other} or {*(other if None in one else one if None in other else ())}
    return tuple(sorted(seeds, key=str))


def stacked(row: BySeed, seeds: Sequence[Any]) -> Scores:
    """Return flags of a row, task -> `[seeds, items]`."""
    runs = [row[seed if seed in row else None] for seed in seeds]
    return {task: np.stack([run[task] for run in runs]) for task in runs[0]}


def differences(scores: Mapping[RowKey, BySeed], pairs: Iterable[Any]) -> list[Difference]:
    """Compare pairs of rows over common seeds, with Holm's correction over these pairs.

    Args:
        scores: Each row's flags per test item, by seed.
        pairs: The pairs, by the rows' keys. Pairs without a common seed are left out.
    """
    common = {(a, b): common_seeds(scores[a], scores[b]) for a, b in pairs}
    common = {pair: seeds for pair, seeds in common.items() if seeds}
    if not common:
        return []
    sides = list(dict.fromkeys((key, seeds) for pair, seeds in common.items() for key in pair))
    bootstrap = Bootstrap([stacked(scores[key], seeds) for key, seeds in sides])
    result = []
    for (a, b), seeds in common.items():
        interval, p = bootstrap.difference(sides.index((a, seeds)), sides.index((b, seeds)))
        result.append(Difference(a, b, interval, p, seeds=seeds))
    return _corrected(result)


def _corrected(uncorrected: Sequence[Difference]) -> list[Difference]:
    adjusted = holm([difference.p for difference in uncorrected])
    return [
        replace(difference, adjusted=p) for difference, p in zip(uncorrected, adjusted, strict=True)
    ]


def holm(values: list[float]) -> list[float]:
    """Return p-values corrected for their number, in the same order (Holm, 1979)."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted


def against(scores: Mapping[RowKey, BySeed], name: str) -> list[Difference]:
    """Compare every row with one row.

    Args:
        scores: Each row's flags per test item, by seed.
        name: The row, as for `find_row`.

    Raises:
        ReportError: If no row or several have the name.
    """
    reference = find_row(scores, name)
    return differences(scores, ((key, reference) for key in scores if key != reference))


def over_suites(averages: Mapping[RowKey, float], name: str) -> list[Difference]:
    """Compare every row that all suites have with one row, over the suites.

    Args:
        averages: Each row's average accuracy. Base and experts are left out.
        name: The row, as for `find_row`.

    Raises:
        ReportError: If no row or several have the name, or a suite lacks it.
    """
    suites = list(dict.fromkeys(key[0] for key in averages))
    rows = list(dict.fromkeys(key[1:] for key in averages if key[2] not in (BASE, EXPERTS)))
    reference = find_row([("", *row) for row in rows], name)[1:]
    if lacking := [suite for suite in suites if (suite, *reference) not in averages]:
        raise ReportError(f"--against: {', '.join(lacking)} has no row {name!r}")
    result = []
    for row in rows:
        if row == reference or any((suite, *row) not in averages for suite in suites):
            continue
        values = {s: averages[(s, *row)] - averages[(s, *reference)] for s in suites}
        interval = student_interval([*values.values()], SUITES)
        p = _student_p([*values.values()])
        result.append(Difference(("", *row), ("", *reference), interval, p, by_suite=values))
    return _corrected(result)


def find_row(keys: Iterable[RowKey], name: str) -> RowKey:
    """Return the row with a name: `merger/row`, or only the row's if one merger has it.

    Raises:
        ReportError: If no row or several have the name.
    """
    names = {key: row_name(key) for key in keys}
    matches = [key for key, text in names.items() if text == name]
    matches = matches or [key for key in names if key[2] == name]
    if len(matches) != 1:
        valid = [names[key] for key in matches] or list(names.values())
        near = [] if matches else get_close_matches(name, names.values(), 1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ReportError(f"--against: name one row, got {name!r}{hint}. There are: {valid}")
    return matches[0]


def row_name(key: RowKey) -> str:
    """Return `merger/row`. A merger alone and references have a plain name."""
    _, upstream, row = key
    return row if upstream in (None, row) or row in (BASE, EXPERTS) else f"{upstream}/{row}"


def difference_grid(shown_differences: Sequence[Difference], reference: str) -> Grid:
    """Return a line for each difference, with its outcome or the difference in each suite."""
    suites = list(shown_differences[0].by_suite) if shown_differences else []
    lines = [
        (
            row_name(difference.row),
            [
                *difference.cells,
                *(
                    [f"{100 * difference.by_suite[suite]:+z.1f}" for suite in suites]
                    or [difference.outcome]
                ),
            ],
        )
        for difference in shown_differences
    ]
    return Grid(f"against {reference}", [*INTERVAL_COLUMNS, *(suites or [""])], lines)
