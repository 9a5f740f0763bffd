"""Every merger and every post-merging method in one table: what it gives, and what it takes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .combine import Combined, CombinedRow, combine
from .combined_report import displayed_rows
from .names import EXPERTS, UNAVAILABLE
from .published import Published, published_average
from .report import Report

# What a cell says about its model besides the costs that are measured.
TASK_ID = "task_id_at_inference"
MODULES_ADDED = "modules_added"
PARAMETERS_ADDED = "parameters_added"
SECONDS_PER_SAMPLE = "inference_seconds_per_sample"


@dataclass(frozen=True, kw_only=True)
class FailedCell:
    """A cell that gave no result.

    Attributes:
        upstream: The upstream merger; None for a reference.
        name: The cell, or the merger's own name if it failed itself.
        reason: What went wrong.
    """

    upstream: str | None
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SideBySideRow:
    """One row of the comparison.

    Attributes:
        row: Accuracies, gain and intervals over the runs.
        normalised: Mean over tasks of accuracy / the task's expert's accuracy; None without them.
        cost: Costs and additions: a mean over runs, "unavailable" where a run could not measure
            it, or text; empty for the references.
        samples: Calibration samples per task with their split, such as `256 train`; "" for none.
        seeds: The seeds of the row itself, one a run; empty where it has none.
        published: The paper's average; None where it has none.
    """

    row: CombinedRow
    normalised: float | None
    cost: dict[str, Any]
    samples: str
    seeds: list[int]
    published: Published | None


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """A comparison: its rows in the order of display, and the cells that failed."""

    suite: str
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
        ReportError: A report is damaged, or the runs do not belong together.
    """
    combined = combine(directories)
    reports = [Report.load(directory) for directory in directories]
    suite = combined.suites[0]
    experts = next((row for row in combined.rows if row.name == EXPERTS), None)
    rows = [
        _side_by_side_row(row, experts, [r for r in reports if _holds(r, row)])
        for row in displayed_rows(combined, suite)
    ]
    return SideBySide(suite=suite, combined=combined, rows=rows, failed=list(failed))


def _holds(report: Report, row: CombinedRow) -> bool:
    return report.upstream == row.upstream and row.name in report.rows


def _side_by_side_row(
    row: CombinedRow, experts: CombinedRow | None, reports: Sequence[Report]
) -> SideBySideRow:
    seeds = dict.fromkeys(report.seeds.get(row.name) for report in reports)
    return SideBySideRow(
        row=row,
        normalised=normalised_average(row, experts),
        cost=_cost(row, [report.cost.get(row.name, {}) for report in reports]),
        samples=_samples([report.samples.get(row.name, {}) for report in reports]),
        seeds=[seed for seed in seeds if seed is not None],
        published=published_average(row.suite, row.upstream, row.name),
    )


def normalised_average(row: CombinedRow, experts: CombinedRow | None) -> float | None:
    """Mean over tasks of accuracy divided by the task's expert's; None without experts."""
    if experts is None or any(experts.accuracy[task] <= 0 for task in row.tasks):
        return None
    shares = [row.accuracy[task] / experts.accuracy[task] for task in row.tasks]
    return math.fsum(shares) / len(shares)


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
