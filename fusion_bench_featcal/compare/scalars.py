"""A report as named numbers, for loggers."""

import re

from .names import AVERAGE, BASE, EXPERTS
from .report import Report
from .side_by_side import NORMALISED, normalised_average

# What MLflow refuses in names and TensorBoard replaces.
_UNFIT = re.compile(r"[^\w./ -]")


def report_scalars(report: Report) -> dict[str, float]:
    """Every number of a report.

    Returns:
        `<row>/<what>` for `base`, `experts` and the upstream merger, `<merger>/<row>/<what>` for
        what was made of it. What: `accuracy/<task>`, `average`, `loss/<task>`, `loss/average`,
        `normalised`, `gain` (over the merger), `recovered_gap`, and the costs. What is not known or
        could not be measured is left out. Characters that loggers refuse become `_`.
    """
    scalars = {}
    for name in report.rows:
        place = name
        if report.upstream and name not in (BASE, EXPERTS, report.upstream):
            place = f"{report.upstream}/{name}"
        for what, value in _row_scalars(report, name).items():
            scalars[_UNFIT.sub("_", f"{place}/{what}")] = value
    return scalars


def _row_scalars(report: Report, name: str) -> dict[str, float]:
    row, merged = report.rows[name], report.rows.get(report.upstream or "")
    values = {f"accuracy/{task}": row[task] for task in report.tasks}
    values[AVERAGE] = row[AVERAGE]
    values |= {f"loss/{task}": value for task, value in report.loss.get(name, {}).items()}
    derived = {NORMALISED: normalised_average(row, report.rows.get(EXPERTS))}
    if name not in (BASE, EXPERTS, report.upstream):
        derived["gain"] = None if merged is None else row[AVERAGE] - merged[AVERAGE]
        derived["recovered_gap"] = report.share(name, AVERAGE)
    values |= {what: value for what, value in derived.items() if value is not None}
    costs = report.cost.get(name, {}).items()
    return values | {what: float(cost) for what, cost in costs if isinstance(cost, int | float)}
