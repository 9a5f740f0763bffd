"""Summary of several runs (seeds, upstream mergers, model pools) as averaged rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from .intervals import (
    Interval,
    Scores,
    interval_of_mean,
    over_seeds,
    paired_difference,
    recovered_gap_interval,
)
from .long_table import (
    AVERAGE,
    BASE,
    COMPARISON_SEED,
    EXPERTS,
    NORMALISED,
    UNAVAILABLE,
    RowKey,
    is_repair,
)
from .measures import normalised_average, recovered_share, samples_range, worst_task
from .notes import Note
from .run_rows import RunRows
from .runs import check_averages, notes_of_runs


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """One row name on one upstream merger of one suite, over all runs that have it."""

    suite: str
    upstream: str | None  # the merger's row, or None if the runs had no merged model
    name: str
    run_seeds: list[dict[str, int | None]]  # one entry per run
    seeds: list[int]  # of the row itself, empty if it has none
    accuracy: dict[str, float]  # task (and `average`) -> mean over runs, 0..1
    deviation: dict[str, float] | None  # standard deviations over runs (n - 1), None for one
    # Relative to the merger and the experts, from means over the same runs. Intervals come from
    # `over_seeds`. One run without items has none.
    gain: float | None
    gain_interval: Interval | None
    recovered_gap: float | None
    recovered_gap_interval: Interval | None
    cost: dict[str, Any]  # the mean if all runs have a number, else their common text
    worst_task: str | None  # None for references
    worst_recovered_gap: float | None
    loss: dict[str, float]  # task (and `average`) -> mean, if every run has a loss
    normalised: float | None  # mean over tasks of accuracy / the expert's, if there are experts
    spread: dict[str, float]  # deviations over runs of `normalised` and costs, {} for one run
    samples: str  # per task with their split, such as `256 train`, or "" for none

    @property
    def tasks(self) -> list[str]:
        """Task names without the average."""
        return [task for task in self.accuracy if task != AVERAGE]

    @property
    def worst(self) -> tuple[str, float | None] | None:
        """The worst task and the share of its gap recovered, or None for references."""
        return (self.worst_task, self.worst_recovered_gap) if self.worst_task else None

    @property
    def average(self) -> Interval:
        """Average accuracy over the row's runs, with its interval over seeds."""
        return self.interval(self.accuracy[AVERAGE], (self.deviation or {}).get(AVERAGE))

    def interval(self, mean: float, deviation: float | None) -> Interval:
        """Return a mean over the row's runs with its interval, from its deviation."""
        return interval_of_mean(mean, deviation, len(self.run_seeds))

    @property
    def is_reference(self) -> bool:
        """True for the base and the experts, which belong to no merger."""
        return self.name in (BASE, EXPERTS)

    @property
    def is_repair(self) -> bool:
        """True for rows made from a merged model."""
        return is_repair(self.name, self.upstream)


@dataclass(frozen=True, kw_only=True)
class FailedCell:
    """A cell of a comparison without a result."""

    upstream: str | None  # merger, or None for a reference
    name: str  # of the cell, or `none` if the merger itself failed
    reason: str
    seed: int | None = None  # of the comparison, None if unknown


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Rows by suite, upstream merger and name, with runs, failures and notes."""

    rows: list[SummaryRow]  # in the order of the runs
    runs: list[str]  # their folders
    notes: list[Note]
    seeds: list[int] = field(default_factory=list)  # of the comparisons, if known
    failed: list[FailedCell] = field(default_factory=list)
    # Flags per test item of every run, by seed, for rows that have them.
    scores: dict[RowKey, dict[Any, Scores]] = field(default_factory=dict, repr=False)

    @property
    def suites(self) -> list[str]:
        """Names of the suites, in the order of the runs."""
        return list(dict.fromkeys(row.suite for row in self.rows))

    def displayed(self, suite: str) -> list[SummaryRow]:
        """Return references first, once if all mergers agree on them, then merger by merger."""
        rows = [row for row in self.rows if row.suite == suite]
        references: dict[tuple[Any, ...], SummaryRow] = {}
        for row in rows:
            if row.is_reference:
                references.setdefault((row.name, *row.accuracy.values()), row)
        order = sorted(references.values(), key=lambda row: row.name != BASE)
        other_rows = [row for row in rows if not row.is_reference]
        # The merger comes before its repairs, for any order in the report.
        mergers = list(dict.fromkeys(row.upstream for row in other_rows))
        other_rows.sort(key=lambda row: (mergers.index(row.upstream), row.name != row.upstream))
        return order + other_rows


def summarise_reports(
    reports: Mapping[Path, RunRows], failed: Sequence[FailedCell] = ()
) -> Summary:
    """Average matching runs.

    Args:
        reports: Folder of a run -> its report.
        failed: Cells of comparisons without a result.

    Raises:
        ReportError: As `check_averages`.
    """
    check_averages(reports)
    rows = _by_row(reports.values())
    # For runs without experts, experts of another merger are used.
    experts = {key[0]: _accuracy(EXPERTS, rows[key]) for key in rows if key[2] == EXPERTS}
    return Summary(
        rows=[_summary_row(key, of, experts.get(key[0])) for key, of in rows.items()],
        runs=[str(path) for path in reports],
        notes=notes_of_runs(reports),
        seeds=_each_once(report.seeds.get(COMPARISON_SEED) for report in reports.values()),
        failed=list(failed),
        scores=_scores(rows),
    )


def _by_row(reports: Iterable[RunRows]) -> dict[RowKey, list[RunRows]]:
    """Return the reports of each row, with a repeated run once and a merger's rows together."""
    rows: dict[RowKey, dict[str, RunRows]] = {}
    for report in reports:
        for name in report.rows:
            of_row = rows.setdefault((report.suite, report.upstream, name), {})
            of_row.setdefault(report.seeds_key, report)
    groups = list(dict.fromkeys(key[:2] for key in rows))
    return {key: [*rows[key].values()] for key in sorted(rows, key=lambda k: groups.index(k[:2]))}


def _scores(rows: Mapping[RowKey, Sequence[RunRows]]) -> dict[RowKey, dict[Any, Scores]]:
    """Return flags by row, seed and task. References of all mergers appear once per suite."""
    scores: dict[RowKey, dict[Any, Scores]] = {}
    for (suite, merger, name), reports in rows.items():
        owner = None if name in (BASE, EXPERTS) else merger
        if all(name in report.items for report in reports):
            by_seed = scores.setdefault((suite, owner, name), {})
            for report in reports:
                by_seed.setdefault(report.seed, report.items[name])
    return scores


def _each_once(seeds: Iterable[int | None]) -> list[int]:
    return [seed for seed in dict.fromkeys(seeds) if seed is not None]


# ---- one row


def _summary_row(
    key: RowKey, reports: Sequence[RunRows], other_experts: Mapping[str, Sequence[float]] | None
) -> SummaryRow:
    suite, upstream, name = key
    accuracy = _accuracy(name, reports)
    shares = _normalised(name, reports, other_experts)
    costs = _costs(name, reports)
    numbers = {what: values for what, values in costs.items() if _are_numbers(values)}
    used_samples = (entry for report in reports for entry in report.samples.get(name, {}).values())
    return SummaryRow(
        suite=suite,
        upstream=upstream,
        name=name,
        run_seeds=[report.seeds for report in reports],
        seeds=_each_once(report.seeds.get(name) for report in reports),
        accuracy=_means(accuracy),
        deviation=_deviations(accuracy) if len(reports) > 1 else None,
        **_against_merger(name, reports),
        cost={what: _common_text(values) for what, values in costs.items()} | _means(numbers),
        loss=_means(_columns([report.loss.get(name, {}) for report in reports])),
        normalised=fmean(shares) if len(shares) == len(reports) else None,
        spread={
            what: stdev(values)
            for what, values in {NORMALISED: shares, **numbers}.items()
            if len(values) > 1
        },
        samples=" ".join(samples_range(used_samples)),
    )


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return one value per row for the keys that all rows have."""
    return {key: [row[key] for row in rows] for key in rows[0] if all(key in row for row in rows)}


def _accuracy(name: str | None, reports: Sequence[RunRows]) -> dict[str, list[float]]:
    """Return task -> accuracy in every run, or nothing if a run lacks the row."""
    return _columns([report.rows.get(name or "", {}) for report in reports])


def _costs(name: str, reports: Sequence[RunRows]) -> dict[str, list[Any]]:
    """Return each cost's values, one per run, "unavailable" if a run lacks it."""
    costs = [
        {what: value for what, value in report.cost.get(name, {}).items() if value is not None}
        for report in reports
    ]
    kinds = dict.fromkeys(what for cost in costs for what in cost)
    return {what: [cost.get(what, UNAVAILABLE) for cost in costs] for what in kinds}


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {task: float(np.mean(numbers)) for task, numbers in values.items()}


def _deviations(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {task: float(np.std(numbers, ddof=1)) for task, numbers in values.items()}


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _common_text(values: Sequence[Any]) -> str:
    texts = {str(value) for value in values}
    return texts.pop() if len(texts) == 1 else UNAVAILABLE


def _against_merger(name: str, reports: Sequence[RunRows]) -> dict[str, Any]:
    """Return gain, recovered gap and worst task over common runs, with their intervals."""
    upstream = reports[0].upstream
    sides = [_accuracy(row_name, reports) for row_name in (name, upstream, EXPERTS)]
    row, merged, experts = map(_means, sides)
    of_row, of_merged, of_experts = (side.get(AVERAGE, []) for side in sides)
    flags = [_flags(row_name, reports) for row_name in (name, upstream, EXPERTS)]
    gain = share = worst = gain_interval = share_interval = None
    several = len(reports) > 1
    if merged:
        gain = row[AVERAGE] - merged[AVERAGE]
        gains = [one - other for one, other in zip(of_row, of_merged, strict=True)]
        items = paired_difference(flags[0], flags[1]) if all(flags[:2]) else None
        gain_interval = over_seeds(gain, gains, items) if items or several else None
        if is_repair(name, upstream):
            worst = worst_task(row, merged, experts or None)
    if merged and experts:
        share = recovered_share(row[AVERAGE], merged[AVERAGE], experts[AVERAGE])
        by_seed = map(recovered_share, of_row, of_merged, of_experts)
        shares = [value for value in by_seed if value is not None]
        has_items = all(flags)
        items = recovered_gap_interval(*flags) if has_items else None
        if (
            share is not None
            and len(shares) == len(reports)
            and (items or (several and not has_items))
        ):
            share_interval = over_seeds(share, shares, items)
    return {
        "gain": gain,
        "gain_interval": gain_interval,
        "recovered_gap": share,
        "recovered_gap_interval": share_interval,
        "worst_task": worst and worst[0],
        "worst_recovered_gap": worst and worst[1],
    }


def _flags(name: str | None, reports: Sequence[RunRows]) -> Scores:
    """Return flags per test item, task -> `[seeds, items]`, or nothing if a run lacks them."""
    columns = _columns([report.items.get(name or "", {}) for report in reports])
    return {task: np.stack(arrays) for task, arrays in columns.items()}


def _normalised(
    name: str, reports: Sequence[RunRows], other: Mapping[str, Sequence[float]] | None
) -> list[float]:
    """Return the normalised average of each run that has one."""
    expert_means = _means(other) if other else None
    shares = (
        normalised_average(report.rows[name], report.rows.get(EXPERTS) or expert_means)
        for report in reports
    )
    return [share for share in shares if share is not None]
