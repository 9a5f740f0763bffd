"""Results as one long table: suite, merger, row, task, seed, metric, value; and its measures."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

BASE = "base"
EXPERTS = "experts"
FEATCAL = "featcal"
AVERAGE = "average"
NORMALISED = "normalised"
UNAVAILABLE = "unavailable"
COMPARISON_SEED = "comparison"
"""Key of a comparison's seed among the seeds of a run."""
GIVEN = "merged"
"""Row of a merged model whose merger is not known."""
LEAST_GAP = 0.01
"""Smallest merged-to-expert gap of a task of which a share is compared: one point."""

ACCURACY, LOSS, CORRECT, GAIN, SHARE, COST = (
    "accuracy", "loss", "correct", "gain", "recovered_gap", "cost.",
)  # fmt: skip

Row = Mapping[str, float]
"""Task (and `average`) -> accuracy."""


class Entry(NamedTuple):
    """One value of the table."""

    suite: str  # model pool
    merger: str | None  # upstream merger; None where the run had no merged model
    row: str
    task: str  # or `average` over tasks, or "" for what is about the model as a whole
    seed: str  # the run's seeds, as JSON: they tell runs apart that are averaged
    metric: str  # one of the constants above, `normalised`, or `cost.` and what was measured
    value: Any  # a number, a text such as "unavailable", or flags per test item (`correct`)


RowKey = tuple[str, str | None, str]
"""Suite, merger and row."""


def file_suffix(row: str) -> str:
    """Ending of the names of a FeatCal row's own files: `.plus` of `featcal:plus`."""
    return row.removeprefix(FEATCAL).replace(":", ".")


class LongTable:
    """Entries of any number of runs, looked up by row, metric, task and seed.

    A repeated run counts once: of entries that differ in nothing but their value, the first stays.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        """Index the entries."""
        self._values: dict[RowKey, dict[str, dict[str, dict[str, Any]]]] = {}
        for suite, merger, row, task, seed, metric, value in entries:
            metrics = self._values.setdefault((suite, merger, row), {})
            metrics.setdefault(metric, {}).setdefault(task, {}).setdefault(seed, value)

    def rows(self) -> list[RowKey]:
        """Rows in order of appearance, those of one merger and suite together."""
        groups = list(dict.fromkeys((suite, merger) for suite, merger, _ in self._values))
        return sorted(self._values, key=lambda key: groups.index(key[:2]))

    def seeds(self, key: RowKey) -> list[str]:
        """Seeds of the runs that have a row."""
        return list(self._values[key][ACCURACY][AVERAGE])

    def values(self, key: RowKey, metric: str, seeds: Sequence[str]) -> dict[str, list[Any]]:
        """Task -> one value a seed, for the tasks that have one for every seed."""
        tasks = self._values.get(key, {}).get(metric, {})
        return {
            task: [values[seed] for seed in seeds]
            for task, values in tasks.items()
            if all(seed in values for seed in seeds)
        }

    def costs(self, key: RowKey, seeds: Sequence[str]) -> dict[str, list[Any]]:
        """Return each cost's values, one a seed; "unavailable" where a run lacks it."""
        return {
            metric.removeprefix(COST): [tasks[""].get(seed, UNAVAILABLE) for seed in seeds]
            for metric, tasks in self._values[key].items()
            if metric.startswith(COST)
        }


def merged_by(merger: str | None) -> str:
    """Phrase on the upstream merger, for titles."""
    return "merged elsewhere" if merger == GIVEN else f"merged by {merger or 'nobody'}"


def is_repair(row: str, merger: str | None) -> bool:
    """Tell what was made of a merged model from the references: base, experts and the merger."""
    return row not in (BASE, EXPERTS, merger)


def samples_range(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Number of samples per task and their splits, such as `256` and `train`; nothing for none."""
    drawn = list(entries)
    if not drawn:
        return []
    counts = sorted({int(entry["samples"]) for entry in drawn})
    splits = sorted({str(entry["split"]) for entry in drawn})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return [number, " and ".join(splits)]


def mean(row: Row) -> float:
    """Mean over the tasks of a row (which must not hold the average itself)."""
    return math.fsum(row.values()) / len(row)


def recovered_share(value: float, merged: float, expert: float) -> float | None:
    """Share of the gap between merged and expert that `value` closes; None if there is no gap."""
    gap = expert - merged
    return (value - merged) / gap if gap > 0 else None


def worst_task(
    row: Row, merged: Row | None, experts: Row | None
) -> tuple[str, float | None] | None:
    """Return the task with the smallest share of its merged-to-expert gap recovered, and the share.

    Only tasks with a gap of at least `LEAST_GAP` count. Without any, or without experts, it is the
    task with the smallest gain over the merged model, and None. Without merged model it is None.
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
    """Mean over tasks of accuracy divided by the task's expert's; None without experts."""
    tasks = [task for task in row if task != AVERAGE]
    if experts is None or any(experts[task] <= 0 for task in tasks):
        return None
    return math.fsum(row[task] / experts[task] for task in tasks) / len(tasks)
