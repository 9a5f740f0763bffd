"""Every merger and every post-merging method in one table: what it gives, and what it takes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fusion_bench_featcal.files import ReportError

from .combine import Combined, CombinedRow, combine
from .combined_report import displayed_rows
from .find import FailedCell
from .names import EXPERTS, NORMALISED, UNAVAILABLE, normalised_average
from .published import Published, published_average
from .report import Report

# What a cell says about its model besides the costs that are measured.
TASK_ID = "task_id_at_inference"
MODULES_ADDED = "modules_added"
PARAMETERS_ADDED = "parameters_added"
SECONDS_PER_SAMPLE = "inference_seconds_per_sample"
# The seed of all mergers and cells of a comparison, among the seeds of its reports.
COMPARISON_SEED = "comparison"


@dataclass(frozen=True, kw_only=True)
class SideBySideRow:
    """One row of the comparison.

    Attributes:
        row: Accuracies, gain and intervals over the runs.
        normalised: Mean over tasks of accuracy / the task's expert's accuracy; None without them.
        cost: Costs and additions: a mean over runs, "unavailable" where a run could not measure
            it, or text.
        spread: Standard deviation over runs (n - 1) of `normalised` and of each cost that is a
            number; empty for one run.
        samples: Calibration samples per task with their split, such as `256 train`; "" for none.
        seeds: The seeds of the row itself, one a run; empty where it has none.
        published: The paper's average; None where it has none.
    """

    row: CombinedRow
    normalised: float | None
    cost: dict[str, Any]
    spread: dict[str, float]
    samples: str
    seeds: list[int]
    published: Published | None


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """A comparison: its rows in the order of display, and the cells that failed.

    Attributes:
        suite: Name of the model pool.
        seeds: Seeds of the comparisons that were combined, where they are known.
        combined: The runs' results.
        rows: References first, then merger by merger.
        failed: Cells that gave no result, one a seed.
    """

    suite: str
    seeds: list[int]
    combined: Combined
    rows: list[SideBySideRow]
    failed: list[FailedCell]


def side_by_side(
    directories: Sequence[str | Path], failed: Sequence[FailedCell] = ()
) -> SideBySide:
    """Compare runs of one suite: one report per upstream merger (and seed).

    Args:
        directories: Folders with reports.
        failed: Cells that gave no result.

    Returns:
        The comparison.

    Raises:
        ReportError: A report is damaged, the runs do not belong together, or they are of several
            suites.
    """
    combined = combine(directories)
    reports = [Report.load(directory) for directory in directories]
    if len(combined.suites) > 1:
        raise ReportError(
            f"a comparison is of one suite, these runs are of {', '.join(combined.suites)}: "
            "name those of one suite at a time"
        )
    suite = combined.suites[0]
    experts = next((row for row in combined.rows if row.name == EXPERTS), None)
    rows = [
        _side_by_side_row(row, experts, [r for r in reports if _holds(r, row)])
        for row in displayed_rows(combined, suite)
    ]
    seeds = _known(report.seeds.get(COMPARISON_SEED) for report in reports)
    return SideBySide(suite=suite, seeds=seeds, combined=combined, rows=rows, failed=list(failed))


def _known(seeds: Iterable[int | None]) -> list[int]:
    """Each seed once."""
    return [seed for seed in dict.fromkeys(seeds) if seed is not None]


def _holds(report: Report, row: CombinedRow) -> bool:
    return report.upstream == row.upstream and row.name in report.rows


def _side_by_side_row(
    row: CombinedRow, experts: CombinedRow | None, reports: Sequence[Report]
) -> SideBySideRow:
    shares = [
        normalised_average(report.rows[row.name], report.rows.get(EXPERTS) or _accuracy(experts))
        for report in reports
    ]
    known = [share for share in shares if share is not None]
    whole = bool(known) and len(known) == len(shares)
    costs = [report.cost.get(row.name, {}) for report in reports]
    return SideBySideRow(
        row=row,
        normalised=fmean(known) if whole else None,
        cost=_cost(row, costs),
        spread=_spread({NORMALISED: known} | {k: _numbers(costs, k) for k in row.cost}),
        samples=_samples([report.samples.get(row.name, {}) for report in reports]),
        seeds=_known(report.seeds.get(row.name) for report in reports),
        published=published_average(row.suite, row.upstream, row.name, reports),
    )


def _spread(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {key: stdev(numbers) for key, numbers in values.items() if len(numbers) > 1}


def _numbers(costs: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [cost[key] for cost in costs if isinstance(cost.get(key), int | float)]


def _accuracy(row: CombinedRow | None) -> dict[str, float] | None:
    return None if row is None else row.accuracy


def _cost(row: CombinedRow, costs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means where every run has a number; else the text they agree on, or "unavailable"."""
    keys = dict.fromkeys(key for cost in costs for key in cost)
    found: dict[str, Any] = {}
    for key in keys:
        values = {str(cost.get(key, UNAVAILABLE)) for cost in costs}
        text = values.pop() if len(values) == 1 else UNAVAILABLE
        found[key] = row.cost.get(key, text)
    return found


def _samples(runs: Sequence[dict[str, dict[str, Any]]]) -> str:
    entries = [entry for tasks in runs for entry in tasks.values()]
    if not entries:
        return ""
    counts = sorted({int(entry["samples"]) for entry in entries})
    splits = sorted({str(entry["split"]) for entry in entries})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{number} {' and '.join(splits)}"
