"""Names and values of a run's results for loggers."""

import re
from pathlib import Path
from typing import Any

from .curves import MOMENTS, drift_records
from .figures import CALIBRATION_LOG
from .long_table import ACCURACY, AVERAGE, COST, FEATCAL, GAIN, LOSS, SHARE, Entry, is_repair, mean
from .report import Report

# What MLflow refuses in names and TensorBoard replaces.
_UNFIT = re.compile(r"[^\w./ -]")


def _row_name(report: Report, row: str) -> str:
    """Name of a row: below its merger if it was made from the merged model."""
    merger = f"{report.upstream}/" if is_repair(row, report.upstream) and report.upstream else ""
    return f"{merger}{row}"


def report_scalars(report: Report) -> dict[str, float]:
    """Return every number of a report, for loggers.

    Keys are `<row>/<what>` for `base`, `experts` and the upstream merger, and
    `<merger>/<row>/<what>` for what was made of it. What: `accuracy/<task>`, `average`,
    `loss/<task>`, `loss/average`, `normalised`, `gain` (over the merger), `recovered_gap`, and
    the costs. What could not be measured is left out.
    """
    scalars = {}
    for entry in report.entries():
        reference = not is_repair(entry.row, entry.merger)
        what = _scalar_name(entry, reference)
        if what and isinstance(entry.value, int | float):
            name = f"{_row_name(report, entry.row)}/{what}"
            scalars[_UNFIT.sub("_", name)] = float(entry.value)
    return scalars


def _scalar_name(entry: Entry, reference: bool) -> str | None:
    if entry.metric == ACCURACY:
        return AVERAGE if entry.task == AVERAGE else f"accuracy/{entry.task}"
    if entry.metric == LOSS:
        return f"loss/{entry.task}"
    if entry.metric in (GAIN, SHARE) and (reference or entry.task != AVERAGE):
        return None
    return entry.metric.removeprefix(COST)


def drift_steps(report: Report, folder: Path) -> dict[int, dict[str, float]]:
    """Return the drift of every block before and after its calibration.

    Args:
        report: The run's report.
        folder: The folder with its calibration logs.

    Returns:
        Block, counted from 0 in forward order -> name -> value. Names are
        `<merger>/<row>/<drift>_<moment>/<task>` and `.../average`, where drift is `relative_drift`
        (to the expert's feature norm), or `drift` where norms were not recorded.

    Raises:
        ReportError: If a calibration log is damaged.
    """
    steps: dict[int, dict[str, float]] = {}
    for file in sorted(folder.glob(f"{CALIBRATION_LOG}*.jsonl")):
        row = FEATCAL + file.stem.removeprefix(CALIBRATION_LOG).replace(".", ":", 1)
        if row not in report.settings:  # of an earlier run in the same folder
            continue
        records = drift_records(file)
        relative = all(
            r.get(f"relative_drift_{moment}") is not None for r in records for moment in MOMENTS
        )
        blocks = list(dict.fromkeys(record["block"] for record in records))
        for step, block in enumerate(blocks):
            for moment in MOMENTS:
                what = f"{'relative_' * relative}drift_{moment}"
                values = {r["task"]: float(r[what]) for r in records if r["block"] == block}
                for task, value in {**values, AVERAGE: mean(values)}.items():
                    name = f"{_row_name(report, row)}/{what}/{task}"
                    steps.setdefault(step, {})[_UNFIT.sub("_", name)] = value
    return steps


def hyperparameters(report: Report) -> dict[str, Any]:
    """Return suite, merger, and for every row its settings as `<row>/<setting>`."""
    values: dict[str, Any] = {"suite": report.suite, "merger": report.upstream}
    for row, settings in report.settings.items():
        for name, value in settings.items():
            values[_UNFIT.sub("_", f"{_row_name(report, row)}/{name}")] = value
    return values
