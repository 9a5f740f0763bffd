"""The table of results as one pandas frame: a line for each row and point, over its seeds."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

from fusion_bench_featcal.errors import ReportError

from .joining import Group, Results, groups_of
from .run import ACCURACY, AVERAGE, EXPERTS
from .statistics import Difference, difference, holm

LEAST_GAP = 0.01
"""Smallest merged-to-expert gap in accuracy of a task for a share of it: one point."""
_LOWER = ("loss", "perplexity", "error", "drift")
"""Words in the names of metrics of which lower values are better."""


def summary(results: Results, metric: str | None = None) -> Any:
    """Return a pandas DataFrame with a line for each row of `groups_of`.

    Columns: `suite`, `merger`, `row`, the labels, `accuracy.<task>` and `accuracy.average` (or of
    another metric); for rows made from a merged model `gain` over it, `half` of its 95 % interval,
    `share` of the gap to the experts, and the task with the smallest share: `worst_task`,
    `worst_share`, `worst_value`; then `seeds`, costs `cost.*` and `samples`. `attrs` has the
    `metric` and the names of the `labels`, for the views.

    Args:
        results: Joined runs.
        metric: Name of the metric, such as `loss`. None: accuracy, else the first that there is,
            else rows without one.

    Raises:
        ReportError: If no row has the metric.
    """
    from pandas import DataFrame  # slow to import

    metric = _metric(results, metric)
    groups = [of for of in groups_of(results) if of.means(metric) or not results.metrics]
    tasks = dict.fromkeys(task for group in groups for task in group.means(metric))
    tasks.pop(AVERAGE, None)
    lines = [_line(group, groups, metric) for group in groups]
    values = [f"{metric}.{task}" for task in (*tasks, AVERAGE)]
    heads = ["suite", "merger", "row", *results.labels, *values, "gain", "half", "share",
             "worst_task", "worst_share", "worst_value", "seeds"]  # fmt: skip
    more = [*(key for line in lines for key in line), "samples"]
    heads += [key for key in dict.fromkeys(more) if key not in heads]
    frame = DataFrame(lines, columns=heads, dtype=object)
    numbers = [head for head in heads if head not in results.labels]  # 8 samples stay an integer
    frame[numbers] = frame[numbers].infer_objects()
    frame.attrs |= {"metric": metric, "labels": results.labels}
    return frame


def _metric(results: Results, metric: str | None) -> str:
    metrics = results.metrics
    if metric is None:
        return ACCURACY if ACCURACY in metrics else next(iter(metrics), ACCURACY)
    if metric not in metrics:
        raise ReportError(
            f"--metric: no row has {metric!r}; there are {', '.join(metrics) or 'none'}"
        )
    return metric


def _line(group: Group, groups: Sequence[Group], metric: str) -> dict[str, Any]:
    row, means = group.first, group.means(metric)
    position = {"suite": row.suite, "merger": row.merger, "row": row.name, **row.labels}
    seeds = {"seeds": len(group.rows)}
    costs = {f"cost.{what}": value for what, value in group.cost().items()}
    values = {f"{metric}.{task}": value for task, value in means.items()}
    line = position | values | seeds | costs | {"samples": _samples(group)}
    merged = partner(group, groups, row.merger)
    if not (row.is_repair and merged and means):
        return line
    gain = difference(by_seed(group, metric), by_seed(merged, metric))
    if gain is not None:
        line |= {"gain": gain.value, "half": gain.half, "seeds": gain.seeds}
    experts = partner(group, groups, EXPERTS)
    shares = [side.means(metric) for side in (merged, experts) if side]
    return line | _shares(means, *shares, sign=-1 if any(word in metric for word in _LOWER) else 1)


def _shares(
    row: Mapping[str, float],
    merged: Mapping[str, float],
    experts: Mapping[str, float] | None = None,
    *,
    sign: int,
) -> dict[str, Any]:
    """Return the share of the gap on the average, and the task with the smallest.

    Of accuracies only tasks with a gap of `LEAST_GAP` count. Without any, or without experts, the
    worst task is that with the smallest gain, and has no share.
    """
    gains = {task: sign * (row[task] - merged[task]) for task in row if task in merged}
    gaps = {t: sign * (experts[t] - merged[t]) for t in gains if t in experts} if experts else {}
    least = LEAST_GAP if sign > 0 else 0.0
    result: dict[str, Any] = {}
    if gaps.get(AVERAGE, 0) > 0:
        result["share"] = gains[AVERAGE] / gaps[AVERAGE]
    tasks = {task: gain for task, gain in gains.items() if task != AVERAGE}
    shares = {t: gain / gaps[t] for t, gain in tasks.items() if gaps.get(t, 0) > least * (1 - 1e-9)}
    worst = min(shares or tasks, key=(shares or tasks).__getitem__)
    return result | {
        "worst_task": worst, "worst_share": shares.get(worst), "worst_value": row[worst]
    }  # fmt: skip


def partner(group: Group, groups: Sequence[Group], name: str) -> Group | None:
    """Return the group of the merger's or the experts' row for a row at its point.

    None if there is none, or several, of which no label tells the right one.
    """
    suite, merger = group.first.suite, "" if name == EXPERTS else name
    rows = [
        other
        for other in groups
        if (other.first.suite, other.first.merger, other.first.name) == (suite, merger, name)
        and group.fits(other)
    ]
    return rows[0] if len(rows) == 1 else None


def by_seed(group: Group, metric: str) -> dict[Any, dict[str, Any]]:
    """Return seed -> task -> flags per item, or a value of the whole test set (`statistics`)."""
    has_flags = metric == ACCURACY and all(row.correct for row in group.rows)
    return {
        row.seed: {
            task: (row.correct or {})[task] if has_flags else np.array([value])
            for task, value in row.scores[metric].items()
        }
        for row in group.rows
    }


def _samples(group: Group) -> str:
    """Return the samples per task and their split, such as `256 train`, or nothing."""
    used = [entry for row in group.rows for entry in row.samples.values()]
    counts = sorted({int(entry["samples"]) for entry in used})
    if not counts:
        return ""
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return " ".join([number, *sorted({str(entry["split"]) for entry in used})])


# ---- differences from one row


def against(results: Results, name: str, metric: str | None = None) -> Any:
    """Return every row's difference from one row, with Holm's correction over all of them.

    Args:
        results: Joined runs of one point. Several suites are compared each by itself.
        name: The row, `merger/row`, or only the row's name if one merger has it.
        metric: As in `summary`.

    Returns:
        A pandas DataFrame with the columns `suite`, `row`, `difference`, `half`, `seeds`, `p` and
        `adjusted`. Rows without a seed in common with the named row are left out.

    Raises:
        ReportError: If settings differ between rows of one name, or no row or several have the
            name, or nothing was scored.
    """
    from pandas import DataFrame  # slow to import

    if results.labels:
        raise ReportError(
            f"--against compares rows of equal settings, and {', '.join(results.labels)} differ"
        )
    metric = _metric(results, metric)
    groups = [group for group in groups_of(results) if group.means(metric)]
    if not groups:
        raise ReportError("--against: nothing was scored, so there are no rows to compare")
    compared_rows: list[tuple[Group, Difference]] = []
    for suite in dict.fromkeys(group.first.suite for group in groups):
        of_suite = [group for group in groups if group.first.suite == suite]
        reference = _find(of_suite, name)
        for group in of_suite:
            compared = difference(by_seed(group, metric), by_seed(reference, metric))
            if group is not reference and compared is not None:
                compared_rows.append((group, compared))
    numbers = [number for number, (_, of) in enumerate(compared_rows) if of.p is not None]
    adjusted = dict(
        zip(numbers, holm([compared_rows[n][1].p or 0.0 for n in numbers]), strict=True)
    )
    frame = DataFrame(
        [
            {
                "suite": group.first.suite, "row": group.first.title, "difference": of.value,
                "half": of.half, "seeds": of.seeds, "p": of.p, "adjusted": adjusted.get(number),
            }
            for number, (group, of) in enumerate(compared_rows)
        ],
        columns=["suite", "row", "difference", "half", "seeds", "p", "adjusted"],
    )  # fmt: skip
    frame.attrs["metric"] = metric
    return frame


def _find(groups: Sequence[Group], name: str) -> Group:
    titles = [group.first.title for group in groups]
    matches = [group for group in groups if group.first.title == name]
    matches = matches or [group for group in groups if group.first.name == name]
    if len(matches) != 1:
        choices = [group.first.title for group in matches] or titles
        near = [] if matches else get_close_matches(name, titles, 1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ReportError(f"--against: name one row, got {name!r}{hint}. There are: {choices}")
    return matches[0]
