"""Figures of runs and comparisons, each one call of a chart."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.lab.report.diagnosis import diagnosis_figures, diagnosis_of
from fusion_bench_featcal.results.curves import MOMENTS, calibration_logs, load_curves
from fusion_bench_featcal.results.intervals import Interval, paired_difference
from fusion_bench_featcal.results.long_table import AVERAGE, BASE, merged_by
from fusion_bench_featcal.results.summary import Summary, SummaryRow
from fusion_bench_featcal.results.tables import short_blocks, short_names

from . import charts
from .differences import common_seeds, stacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = "gain over the merged model, points"
_BARS = "95 % interval of the gain over the merged model"


def figures_of(summary: Summary) -> "dict[str, Figure]":
    """Draw all figures for which the runs have files, by name."""
    figures = {}
    for suite in summary.suites:
        rows = [row for row in summary.rows if row.suite == suite and row.name != BASE]
        suite_figures = _of_rows(suite, rows, summary) if rows else {}
        ending = f"-{suite}" if len(summary.suites) > 1 else ""
        figures |= {f"{name}{ending}": figure for name, figure in suite_figures.items()}
    labels = _labels([Path(run) for run in summary.runs])
    return figures | _drifts(labels) | _trainings(labels) | _diagnoses(labels)


def _of_rows(suite: str, rows: Sequence[SummaryRow], summary: Summary) -> "dict[str, Figure]":
    """Draw accuracy by task, averages over several mergers, and gains against seconds."""
    by_task, averages, costs = _Panels(), _Panels(), _Panels()
    for row in rows:
        panel = merged_by(row.upstream)
        name = charts.MERGED if row.name == row.upstream else row.name
        keys = short_names(row.tasks) | {AVERAGE: AVERAGE}
        estimates = {s: _accuracy(row, key, summary).scaled(100) for key, s in keys.items()}
        by_task.setdefault(panel, {})[name] = estimates
        averages.setdefault(panel, {})[name] = {name: estimates[AVERAGE]}
        seconds = row.cost.get("seconds")
        if row.is_repair and row.gain is not None and isinstance(seconds, int | float):
            gain = row.gain_interval or Interval.of(row.gain)
            costs.setdefault(panel, {})[name] = {float(seconds): gain.scaled(100)}
    figures = {
        "accuracy": charts.dots(
            by_task, "accuracy, %", title=f"{suite}: accuracy by task{_bars(by_task, _BARS)}"
        )
    }
    if len(averages) > 1:
        figures["comparison"] = charts.dots(
            averages, "accuracy, %", title=f"{suite}: average accuracy{_bars(averages, _BARS)}"
        )
    if costs:
        figures["cost"] = charts.curves(
            costs, "seconds, without evaluation", _POINTS,
            title=f"{suite}: gain against time{_bars(costs, '95 % interval')}",
        )  # fmt: skip
    return figures


_Panels = dict[str, dict[str, Any]]


def _bars(panels: _Panels, meaning: str) -> str:
    """Return the end of a title that explains error bars, if there are any."""
    values = (value for rows in panels.values() for row in rows.values() for value in row.values())
    return f"; bars: {meaning}" if any(value.over for value in values) else ""


def _accuracy(row: SummaryRow, key: str, summary: Summary) -> Interval:
    """Return the accuracy of a task or the average, with the interval of its gain."""
    value = row.accuracy[key]
    gain = row.gain_interval if row.is_repair and key == AVERAGE else None
    names = (row.name, row.upstream or "") if row.is_repair and key != AVERAGE else ()
    sides = [summary.scores.get((row.suite, row.upstream, name), {}) for name in names]
    if seeds := common_seeds(*sides) if sides else ():
        gain = paired_difference(*({key: stacked(side, seeds)[key]} for side in sides))
    return gain.around(value) if gain else Interval.of(value)


def _drifts(labels: Mapping[Path, str]) -> "dict[str, Figure]":
    """Draw drift by block from the calibration logs of runs."""
    drift, drift_by_task, depth = _Panels(), _Panels(), _Panels()
    logs = [(label, *log) for run, label in labels.items() for log in calibration_logs(run)]
    kind, unit = "relative_drift", "drift / expert's norm"
    if not all(_has(records, kind) for _, _, records, _ in logs):
        kind, unit = "drift", "drift, L2"
    for label, row, records, held_out in logs:
        if records:
            drift[label + row] = {m: _by_block(records, f"{kind}_{m}") for m in MOMENTS}
            drift_by_task[label + row] = _by_task(records, f"{kind}_after")
        if held_out:
            lines = depth.setdefault(label.removesuffix(": "), {})
            lines[charts.MERGED] = _by_block(held_out, "held_out_drift_merged")
            lines[row] = _by_block(held_out, "held_out_drift")
    figures = {}
    if drift:
        title = (
            "Drift of each block's output before and after the calibration of the block, mean over "
            "tasks; calibration samples, all positions"
        )
        figures["drift"] = charts.blocks(drift, unit, title=title)
        title = f"{unit} of each task after each block's calibration"
        figures["drift-tasks"] = charts.heat(drift_by_task, "block", ".2f", title=title)
    if depth:
        title = (
            "Drift after each block, mean over tasks; held-out samples, at the positions that the "
            "head reads"
        )
        figures["depth"] = charts.blocks(depth, "drift / expert's norm", title=title)
    return figures


def _trainings(labels: Mapping[Path, str]) -> "dict[str, Figure]":
    """Draw losses of trainings from the files of runs."""
    losses = _Panels()
    for run, label in labels.items():
        for method, tasks in load_curves(run).items():
            names = short_names([*tasks])
            losses[label + method] = {
                names[task]: {
                    step: Interval.of(loss / (points[0][1] or 1.0)) for step, loss in points
                }
                for task, points in tasks.items()
            }
    if not losses:
        return {}
    title = "Loss of each training, relative to its first step"
    return {"convergence": charts.curves(losses, "updates", "loss / first loss", title=title)}


def _diagnoses(labels: Mapping[Path, str]) -> "dict[str, Figure]":
    """Draw the diagnoses of runs."""
    figures = {}
    for run, label in labels.items():
        ending = f"-{label.removesuffix(': ')}" if label else ""
        run_figures = diagnosis_figures(diagnosis_of(run))
        figures |= {f"{name}{ending}": figure for name, figure in run_figures.items()}
    return figures


def _has(records: Iterable[Mapping[str, Any]], kind: str) -> bool:
    return all(
        record.get(f"{kind}_{moment}") is not None for record in records for moment in MOMENTS
    )


def _by_task(records: Iterable[Mapping[str, Any]], key: str) -> dict[str, dict[str, float]]:
    """Return values by the short names of tasks and blocks. The last record of a block counts."""
    records = list(records)
    tasks = short_names(list(dict.fromkeys(record["task"] for record in records)))
    blocks = list(dict.fromkeys(record["block"] for record in records))
    shorts = dict(zip(blocks, short_blocks(blocks), strict=True))
    values: dict[str, dict[str, float]] = {short: {} for short in tasks.values()}
    for record in records:
        values[tasks[record["task"]]][shorts[record["block"]]] = float(record[key])
    return values


def _by_block(records: Iterable[Mapping[str, Any]], key: str) -> dict[str, float]:
    """Return means over tasks by the short names of blocks."""
    columns: dict[str, list[float]] = {}
    for by_block in _by_task(records, key).values():
        for block, value in by_block.items():
            columns.setdefault(block, []).append(value)
    return {block: fmean(values) for block, values in columns.items()}


def _labels(runs: Sequence[Path]) -> dict[Path, str]:
    """Return prefixes for panels' names: the parts of paths that differ between runs."""
    if len(runs) < 2:
        return dict.fromkeys(runs, "")
    paths = {run: run.resolve() for run in runs}
    shared = os.path.commonpath(paths.values())
    return {run: f"{path.relative_to(shared).as_posix()}: " for run, path in paths.items()}
