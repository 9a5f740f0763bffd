"""Several runs (calibration seeds, upstream mergers, pools) as one result."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fusion_bench_featcal.files import ReportError

from .items import ITEMS_FILE, Interval, paired_difference, recovered_gap_interval
from .names import AVERAGE, BASE, EXPERTS, recovered_share, worst_task
from .report import Report

_SEED_SETTING = "seed"


@dataclass(frozen=True, kw_only=True)
class CombinedRow:
    """One row name on one upstream merger of one suite, over all runs that have it.

    Attributes:
        suite: Model pool.
        upstream: The upstream merger's row; None where the runs had no merged model.
        name: Row name.
        seeds: The seeds of the runs, one entry a run.
        accuracy: Task (and `average`) -> mean over runs, 0..1.
        deviation: Task (and `average`) -> standard deviation over runs (n - 1); None for one run.
        gain: `average` minus the upstream merger's, over the same runs.
        gain_interval: The same from a paired bootstrap over test items; None without items.
        recovered_gap: Share of the merged-to-expert gap, from the means over the same runs.
        recovered_gap_interval: The same from the bootstrap; None without items or without gap.
        cost: Mean over runs of the costs that are numbers in each of them.
        worst_task: The task with the smallest share of its gap recovered, see `worst_task`; None
            for references.
        worst_recovered_gap: That share; None without experts.
        loss: Task (and `average`) -> mean over runs, for those with a loss in every run.
    """

    suite: str
    upstream: str | None
    name: str
    seeds: list[dict[str, int | None]]
    accuracy: dict[str, float]
    deviation: dict[str, float] | None
    gain: float | None
    gain_interval: Interval | None
    recovered_gap: float | None
    recovered_gap_interval: Interval | None
    cost: dict[str, float]
    worst_task: str | None = None
    worst_recovered_gap: float | None = None
    loss: dict[str, float] = field(default_factory=dict)

    @property
    def tasks(self) -> list[str]:
        """Task names, without the average."""
        return [task for task in self.accuracy if task != AVERAGE]


@dataclass(frozen=True, kw_only=True)
class Combined:
    """Rows by suite, upstream merger and name, and what a reader must know about them."""

    rows: list[CombinedRow]
    runs: list[str]
    notes: list[str]

    @property
    def suites(self) -> list[str]:
        """Names of the suites, in the order of the runs."""
        return list(dict.fromkeys(row.suite for row in self.rows))


@dataclass(frozen=True)
class _Run:
    path: Path
    report: Report


def combine(directories: Sequence[str | Path]) -> Combined:
    """Load runs and average what belongs together.

    Args:
        directories: Folders of runs, as `compare.find.find_runs` returns them.

    Raises:
        ReportError: A report is damaged or of another schema; runs of one suite have other tasks
            or test sets; a row was made with other settings; or two runs with the same seeds
            disagree. The message shows the difference.
    """
    runs = [_Run(Path(directory), Report.load(directory)) for directory in directories]
    groups: dict[tuple[str, str | None], list[_Run]] = {}
    for run in runs:
        groups.setdefault((run.report.suite, run.report.upstream), []).append(run)
    first: dict[str, _Run] = {}
    for run in runs:
        _check_test_sets(first.setdefault(run.report.suite, run), run)
    rows = []
    for members in groups.values():
        for name in dict.fromkeys(name for run in members for name in run.report.rows):
            having = [run for run in members if name in run.report.rows]
            rows.append(_combined_row(name, _distinct(name, having)))
    return Combined(rows=rows, runs=[str(run.path) for run in runs], notes=_notes(runs))


def _check_test_sets(first: _Run, run: _Run) -> None:
    suite = run.report.suite
    if set(first.report.tasks) != set(run.report.tasks):
        raise ReportError(
            f"runs of {suite} have different tasks: "
            f"{_difference(first, first.report.tasks, run, run.report.tasks)}"
        )
    for task, known in first.report.test_sets.items():
        for key, value in run.report.test_sets.get(task, {}).items():
            if known.get(key, value) != value:
                raise ReportError(
                    f"runs of {suite} have different test sets for task '{task}', {key}: "
                    f"{_difference(first, known[key], run, value)}"
                )


def _distinct(name: str, runs: Sequence[_Run]) -> list[_Run]:
    """Check that the runs may be averaged, and count a repeated run once."""
    kept: dict[str, _Run] = {}
    for run in runs:
        _check_settings(name, runs[0], run)
        seeds = json.dumps(run.report.seeds, sort_keys=True)
        twin = kept.setdefault(seeds, run)
        one, two = (each.report.rows[name] for each in (twin, run))
        if one != two:
            raise ReportError(
                f"row '{name}' differs between two runs with the same seeds {seeds}: average "
                f"{_difference(twin, one[AVERAGE], run, two[AVERAGE])}. "
                "Give only one of them, or runs with different seeds."
            )
    return list(kept.values())


def _check_settings(name: str, first: _Run, run: _Run) -> None:
    one, two = (_without_seeds(each.report.settings.get(name, {})) for each in (first, run))
    for key in sorted(set(one) | set(two)):
        if one.get(key) != two.get(key):
            raise ReportError(
                f"row '{name}' was made with different {key}: "
                f"{_difference(first, one.get(key), run, two.get(key))}. "
                "Only the seed may differ between runs that are averaged."
            )


def _without_seeds(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name, without seeds: methods that are applied in order nest theirs."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _without_seeds(value, f"{prefix}{key}.")
        elif key != _SEED_SETTING:
            flat[f"{prefix}{key}"] = value
    return flat


def _difference(first: _Run, one: Any, second: _Run, two: Any) -> str:
    return f"{one} in {first.path}, {two} in {second.path}"


def _combined_row(name: str, runs: Sequence[_Run]) -> CombinedRow:
    report = runs[0].report
    accuracy, deviation = _mean_and_deviation([run.report.rows[name] for run in runs])
    others = [run.report.rows.get(report.upstream or "") for run in runs]
    experts = [run.report.rows.get(EXPERTS) for run in runs]
    gain = share = worst = None
    if all(others):
        merged, _ = _mean_and_deviation([row for row in others if row])
        gain = accuracy[AVERAGE] - merged[AVERAGE]
        expert = None
        if all(experts):
            expert, _ = _mean_and_deviation([row for row in experts if row])
            share = recovered_share(accuracy[AVERAGE], merged[AVERAGE], expert[AVERAGE])
        if name not in (BASE, EXPERTS, report.upstream):
            worst = worst_task(accuracy, merged, expert)
    gain_interval, share_interval = _intervals(name, report.upstream, runs)
    return CombinedRow(
        suite=report.suite,
        upstream=report.upstream,
        name=name,
        seeds=[run.report.seeds for run in runs],
        accuracy=accuracy,
        deviation=deviation,
        gain=gain,
        gain_interval=gain_interval,
        recovered_gap=share,
        recovered_gap_interval=share_interval if share is not None else None,
        cost=_mean_cost([run.report.cost.get(name, {}) for run in runs]),
        worst_task=worst[0] if worst else None,
        worst_recovered_gap=worst[1] if worst else None,
        loss=_mean_cost([run.report.loss.get(name, {}) for run in runs]),
    )


def _intervals(
    name: str, upstream: str | None, runs: Sequence[_Run]
) -> tuple[Interval | None, Interval | None]:
    row, merged, experts = (_stacked(wanted, runs) for wanted in (name, upstream, EXPERTS))
    if row is None or merged is None:
        return None, None
    gain = paired_difference(row, merged)
    return gain, None if experts is None else recovered_gap_interval(row, merged, experts)


def _stacked(name: str | None, runs: Sequence[_Run]) -> dict[str, Any] | None:
    """Task -> `[seeds, items]`; None where a run did not keep its items."""
    if name is None or any(name not in run.report.items for run in runs):
        return None
    return {
        task: np.stack([run.report.items[name][task] for run in runs])
        for task in runs[0].report.tasks
    }


def _mean_and_deviation(
    rows: Sequence[dict[str, float]],
) -> tuple[dict[str, float], dict[str, float] | None]:
    values = {task: [row[task] for row in rows] for task in rows[0]}
    means = {task: float(np.mean(value)) for task, value in values.items()}
    if len(rows) == 1:
        return means, None
    return means, {task: float(np.std(value, ddof=1)) for task, value in values.items()}


def _mean_cost(costs: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        key: float(np.mean([cost[key] for cost in costs]))
        for key in costs[0]
        if all(isinstance(cost.get(key), (int, float)) for cost in costs)
    }


def _notes(runs: Sequence[_Run]) -> list[str]:
    notes = list(dict.fromkeys(note for run in runs for note in run.report.notes))
    without = [str(run.path) for run in runs if not run.report.items]
    if without:
        notes.append(f"no interval for rows without {ITEMS_FILE}: {', '.join(without)}")
    packages = dict.fromkeys(package for run in runs for package in run.report.versions)
    for package in packages:
        found = sorted({run.report.versions.get(package, "not recorded") for run in runs})
        if len(found) > 1:
            notes.append(f"runs used different versions of {package}: {', '.join(found)}")
    return notes
