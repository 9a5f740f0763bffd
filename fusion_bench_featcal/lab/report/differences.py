"""Differences between rows, each with its interval and a p-value corrected for their number."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.results.items import (
    LEVEL,
    Bootstrap,
    BySeed,
    Interval,
    common_seeds,
    stacked,
    student_interval,
    student_p,
)
from fusion_bench_featcal.results.long_table import BASE, EXPERTS, RowKey
from fusion_bench_featcal.results.tables import Grid

WIN, TIE, LOSS = "+", "=", "-"


@dataclass(frozen=True)
class Difference:
    """Average accuracy of one row minus another's, on the same test items.

    Attributes:
        row: The row that is compared.
        other: The row that it is compared with.
        seeds: Seeds that both rows have; all values are of these.
        interval: The difference with its interval over test items and, if several, seeds.
        p: Two-sided p-value, as `Bootstrap.difference` gives it.
        adjusted: By Holm's method, for all differences that are shown together.
    """

    row: RowKey
    other: RowKey
    seeds: tuple[Any, ...]
    interval: Interval
    p: float
    adjusted: float

    @property
    def outcome(self) -> str:
        """`WIN`, `LOSS`, or `TIE` where the adjusted p-value is not below 1 - LEVEL."""
        if self.adjusted >= 1 - LEVEL:
            return TIE
        return WIN if self.interval.estimate > 0 else LOSS


def differences(scores: Mapping[RowKey, BySeed], pairs: Iterable[Any]) -> list[Difference]:
    """Compare pairs of rows over the seeds that both have, with Holm's correction over these pairs.

    Args:
        scores: Each row's flags per test item, by seed.
        pairs: The pairs, by the rows' keys; those without a common seed are left out.
    """
    common = {(a, b): common_seeds(scores[a], scores[b]) for a, b in pairs}
    common = {pair: seeds for pair, seeds in common.items() if seeds}
    if not common:
        return []
    sides = {(key, seeds): None for pair, seeds in common.items() for key in pair}
    places = {side: place for place, side in enumerate(sides)}
    bootstrap = Bootstrap([stacked(scores[key], seeds) for key, seeds in places])
    tested = [
        (a, b, seeds, *bootstrap.difference(places[a, seeds], places[b, seeds]))
        for (a, b), seeds in common.items()
    ]
    adjusted = holm([p for *_, p in tested])
    return [Difference(*entry, value) for entry, value in zip(tested, adjusted, strict=True)]


def holm(values: list[float]) -> list[float]:
    """p-values corrected for their number, in the same order (Holm, 1979)."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted


def against(scores: Mapping[RowKey, BySeed], name: str) -> list[Difference]:
    """Compare every row with one.

    Args:
        scores: Each row's flags per test item, by seed.
        name: The row, as `find_row` takes it.

    Raises:
        ReportError: If no row is called so, or several are.
    """
    reference = find_row(scores, name)
    return differences(scores, ((key, reference) for key in scores if key != reference))


def find_row(keys: Iterable[RowKey], name: str) -> RowKey:
    """The row of a name: `merger/row`, or the row's alone where one merger has it.

    Raises:
        ReportError: If no row is called so, or several are.
    """
    names = {key: row_name(key) for key in keys}
    found = [key for key, text in names.items() if text == name]
    found = found or [key for key in names if key[2] == name]
    if len(found) != 1:
        known = [names[key] for key in found] or list(names.values())
        near = [] if found else get_close_matches(name, names.values(), 1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ReportError(f"--against: name one row, got {name!r}{hint}. There are: {known}")
    return found[0]


@dataclass(frozen=True)
class OverSuites:
    """Average accuracy of one row minus another's, over suites that were trained independently.

    Attributes:
        row: Merger and name of the row that is compared.
        by_suite: Suite -> the difference.
        interval: Their mean with Student's interval: how it would vary over further trainings.
        p: Two-sided p-value of a t test.
        adjusted: By Holm's method, for all rows that are compared with the same one.
    """

    row: tuple[str | None, str]
    by_suite: Mapping[str, float]
    interval: Interval
    p: float
    adjusted: float


def over_suites(averages: Mapping[RowKey, float], name: str) -> list[OverSuites]:
    """Compare every row that all suites have with one, over the suites.

    Args:
        averages: Each row's average accuracy; base and experts are left out.
        name: The row, as `find_row` takes it.

    Raises:
        ReportError: If no row is called so, several are, or a suite lacks it.
    """
    suites = list(dict.fromkeys(key[0] for key in averages))
    rows = {key[1:]: None for key in averages if key[2] not in (BASE, EXPERTS)}
    reference = find_row([("", *row) for row in rows], name)[1:]
    if lacking := [suite for suite in suites if (suite, *reference) not in averages]:
        raise ReportError(f"--against: {', '.join(lacking)} has no row {name!r}")
    rows = [row for row in rows if all((suite, *row) in averages for suite in suites)]
    tested = []
    for row in (row for row in rows if row != reference):
        found = {s: averages[(s, *row)] - averages[(s, *reference)] for s in suites}
        values = np.array([*found.values()])
        tested.append((row, found, student_interval(values), student_p(values)))
    adjusted = holm([p for *_, p in tested])
    return [
        OverSuites(row, found, interval, p, value)
        for (row, found, interval, p), value in zip(tested, adjusted, strict=True)
    ]


def over_suites_grid(found: Iterable[OverSuites], reference: str) -> Grid:
    """A line for each row: the mean, its interval and p-value, and every suite's difference."""
    found = list(found)
    lines = [
        (
            row_name(("", *each.row)),
            [
                *interval_cells(each.interval, each.adjusted),
                *(f"{100 * value:+z.1f}" for value in each.by_suite.values()),
            ],
        )
        for each in found
    ]
    suites = list(found[0].by_suite) if found else []
    return Grid(f"against {reference}", [*INTERVAL_COLUMNS, *suites], lines)


def row_name(key: RowKey) -> str:
    """`merger/row`; a merger by itself and references have their own name."""
    _, upstream, row = key
    return row if upstream in (None, row) or row in (BASE, EXPERTS) else f"{upstream}/{row}"


def difference_grid(found: Iterable[Difference], reference: str) -> Grid:
    """A line for each difference from one row."""
    lines = [
        (
            row_name(each.row),
            [
                *interval_cells(each.interval, each.adjusted),
                {WIN: "above", LOSS: "below", TIE: "tie"}[each.outcome],
            ],
        )
        for each in found
    ]
    return Grid(f"against {reference}", [*INTERVAL_COLUMNS, ""], lines)


INTERVAL_COLUMNS = ("points", "95 % interval", "p (Holm)")


def interval_cells(interval: Interval, adjusted: float) -> list[str]:
    """Return cells of `INTERVAL_COLUMNS`."""
    return [
        f"{100 * interval.estimate:+z.1f}",
        f"{100 * interval.low:+z.1f} to {100 * interval.high:+z.1f}",
        f"{adjusted:.2g}",
    ]
