"""Figures of a page: accuracy, drift, cost and sample efficiency."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.results.curves import MOMENTS, calibration_logs
from fusion_bench_featcal.results.drawing import CALIBRATED, MERGED, marks, panel_marks
from fusion_bench_featcal.results.items import common_seeds, paired_difference, stacked
from fusion_bench_featcal.results.long_table import AVERAGE, BASE, EXPERTS, is_repair, merged_by
from fusion_bench_featcal.results.summary import Summary, SummaryRow
from fusion_bench_featcal.results.tables import percent, short_blocks, short_names

from .groups import Group, labels
from .parts import Figure
from .svg import Axis, Panel, Point, Series

_MEAN = "mean over tasks"
_MERGED = "merged model"
_Records = Sequence[Mapping[str, Any]]


class BlockLine(NamedTuple):
    """A line over blocks: its name, the key of its values in a record, and its look."""

    name: str
    key: str
    look: Mapping[str, Any]


_UNREPAIRED = BlockLine("merged", "held_out_drift_merged", {"color": MERGED, "marker": "s"})


def by_merger(rows: Iterable[SummaryRow]) -> dict[str, list[SummaryRow]]:
    """Rows of each merger that has a repaired model, with the references."""
    rows = list(rows)
    references = [row for row in rows if row.is_reference]
    panels: dict[str, list[SummaryRow]] = {}
    for row in rows:
        if row.upstream is not None and row.is_repair:
            panels.setdefault(row.upstream, [])
    for merger, members in panels.items():
        of_merger = {row.name: row for row in references if row.upstream == merger}
        shared = {row.name: row for row in references}
        members += (shared | of_merger).values()
        members += [r for r in rows if not r.is_reference and r.upstream == merger]
    return panels


def accuracy_figure(group: Group) -> Figure:
    """A panel for each merger: a line for each task, a mark for each row."""
    looks = _looks(group.rows)
    panels = [
        _accuracy_panel(merger, rows, group.summary, looks[merger])
        for merger, rows in by_merger(group.rows).items()
    ]
    bars = any(p.bar for panel in panels for series in panel.series for p in series.points)
    note = "Grey: from the merged model to the experts. The base is left out where it is far below."
    if bars:
        note += (
            " Bars: 95 % interval of the difference to the merged model on that task (paired "
            "bootstrap over test items, given the runs' seeds)."
        )
    return Figure("Accuracy per task", panels, note)


def _looks(rows: Iterable[SummaryRow]) -> dict[str, dict[str, dict[str, Any]]]:
    return panel_marks({m: [row.name for row in own] for m, own in by_merger(rows).items()})


def _accuracy_panel(
    merger: str, rows: Sequence[SummaryRow], summary: Summary, looks: Mapping[str, Any]
) -> Panel:
    names = short_names(rows[0].tasks) | {AVERAGE: AVERAGE}
    # The average stands apart, below the tasks.
    heights = {key: line + 0.5 * (key == AVERAGE) for line, key in enumerate(names)}
    by_name = {row.name: row for row in rows}
    shifts = _shifts([name for name in by_name if is_repair(name, merger)])
    series = _without_far_base([
        Series(_MERGED if name == merger else name, looks[name], [
            _accuracy_point(by_name[name], key, height + shifts.get(name, 0.0), names[key], summary)
            for key, height in heights.items()
        ])
        for name in by_name
    ])  # fmt: skip
    spans = []
    if merger in by_name and EXPERTS in by_name:
        ends = [by_name[name].accuracy for name in (merger, EXPERTS)]
        spans = [(heights[key], 100 * ends[0][key], 100 * ends[1][key]) for key in names]
    averages = ", ".join(
        f"{name} {percent(row.accuracy[AVERAGE])}" for name, row in by_name.items()
    )
    return Panel(
        merged_by(merger),
        Axis.linear(_ends(series), "accuracy, %"),
        Axis.lines({label: heights[key] for key, label in names.items()}),
        series,
        f"Accuracy of each task, {merged_by(merger)}. Averages in per cent: {averages}. "
        "All values are in the table of accuracies.",
        height=70 + (24 + 5 * max(len(shifts) - 2, 0)) * len(names),
        left=31,
        upright=False,
        spans=spans,
    )


def _shifts(names: Sequence[str]) -> dict[str, float]:
    """Shifts of rows off the line of their task, so that equal values stay visible."""
    if len(names) < 2:
        return dict.fromkeys(names, 0.0)
    return {name: 0.6 * place / (len(names) - 1) - 0.3 for place, name in enumerate(names)}


def _without_far_base(series: Sequence[Series]) -> list[Series]:
    """Leave out the base where it lies so far below the other rows that they would be squeezed."""
    others = [one for one in series if one.name != BASE]
    values = _ends(others)
    least = min(values) - (max(values) - min(values)) / 4
    return others if min(_ends(series)) < least else list(series)


def _ends(series: Iterable[Series]) -> list[float]:
    """Values along the horizontal axis, with the ends of their bars."""
    return [end for one in series for p in one.points for end in (p.x, *(p.bar or ()))]


def _accuracy_point(
    row: SummaryRow, key: str, height: float, label: str, summary: Summary
) -> Point:
    value, bar = row.accuracy[key], None
    spread = row.half_width((row.deviation or {}).get(key))
    tip = f"{row.name}, {label}: {percent(value)} %"
    tip += f" ± {percent(spread)} over seeds" if spread is not None else ""
    place = (row.suite, row.upstream)
    one, other = (summary.scores.get((*place, name)) for name in (row.name, row.upstream or ""))
    seeds = common_seeds(one, other) if row.is_repair and one and other else ()
    if one and other and seeds:
        one, other = stacked(one, seeds), stacked(other, seeds)
        chosen = one if key == AVERAGE else [key]
        limits = paired_difference({t: one[t] for t in chosen}, {t: other[t] for t in chosen})
        gain = limits.estimate
        bar = (100 * (value + limits.low - gain), 100 * (value + limits.high - gain))
        tip += f"; {100 * gain:+z.1f} [{100 * limits.low:+z.1f}, {100 * limits.high:+z.1f}] points"
        tip += " over the merged model"
    return Point(100 * value, height, tip, bar)


def cost_figure(group: Group) -> Figure:
    """Gain over the merger against the method's own seconds, a panel for each merger."""
    panels, looks = [], _looks(group.rows)
    for merger, rows in by_merger(group.rows).items():
        timed = [row for row in rows if _timed(row)]
        series = [Series(row.name, looks[merger][row.name], [_cost_point(row)]) for row in timed]
        points = [series.points[0] for series in series]
        if not points:
            continue
        ends = [end for p in points for end in (p.y, *(p.bar or ()))]
        panels.append(
            Panel(
                merged_by(merger),
                Axis.logarithmic([p.x for p in points], "seconds, without evaluation"),
                Axis.linear(ends, "gain over the merger, points", zero=True),
                series,
                f"Gain against seconds, {merged_by(merger)}. {'; '.join(p.tip for p in points)}.",
            )
        )
    return Figure("Cost against accuracy", panels, "Bars: 95 % interval of the gain.")


def _timed(row: SummaryRow) -> bool:
    seconds = row.cost.get("seconds")
    timed = isinstance(seconds, int | float) and seconds > 0
    return timed and row.is_repair and row.gain is not None


def _cost_point(row: SummaryRow) -> Point:
    seconds, gain, limits = row.cost["seconds"], 100 * (row.gain or 0.0), row.gain_interval
    bar = (100 * limits.low, 100 * limits.high) if limits else None
    brackets = f" [{bar[0]:+z.1f}, {bar[1]:+z.1f}]" if bar else ""
    tip = f"{row.name}: {gain:+z.1f}{brackets} points in {seconds:.3g} s"
    return Point(seconds, gain, tip, bar)


def samples_figure(groups: Sequence[Group]) -> Figure:
    """Average accuracy against samples per task, of groups of one suite that differ in them."""
    by_samples = {group.samples: by_merger(group.rows) for group in groups if group.samples}
    panels, looks = [], _looks(row for group in groups for row in group.rows)
    for merger in dict.fromkeys(m for mergers in by_samples.values() for m in mergers):
        rows: dict[str, dict[int, SummaryRow]] = {}
        for samples, mergers in sorted(by_samples.items()):
            for row in mergers.get(merger, ()):
                rows.setdefault(row.name, {})[samples] = row
        rows = {name: of for name, of in rows.items() if len(of) > 1 and name != BASE}
        if rows:
            panels.append(_samples_panel(merger, rows, looks[merger]))
    note = "Bars: 95 % interval of the mean over runs."
    return Figure("Sample efficiency", panels, note)


def _samples_panel(
    merger: str, rows: Mapping[str, Mapping[int, SummaryRow]], looks: Mapping[str, Any]
) -> Panel:
    series = []
    for name, of in rows.items():
        points = []
        for samples, row in of.items():
            value = 100 * row.accuracy[AVERAGE]
            spread = row.half_width((row.deviation or {}).get(AVERAGE))
            bar = (value - 100 * spread, value + 100 * spread) if spread else None
            more = f" ± {percent(spread)}" if spread else ""
            tip = f"{name}, {counted(samples, 'sample')} per task: {value:.1f}{more} %"
            points.append(Point(samples, value, tip, bar))
        series.append(Series(_MERGED if name == merger else name, looks[name], points, joined=True))
    points = [point for one in series for point in one.points]
    x = Axis.logarithmic([point.x for point in points], "samples per task")
    numbers = sorted({point.x for point in points})
    ends = [end for point in points for end in (point.y, *(point.bar or ()))]
    return Panel(
        merged_by(merger),
        replace(x, ticks=[(number, f"{number:g}") for number in numbers]),
        Axis.linear(ends, "average accuracy, %"),
        series,
        f"Accuracy against samples, {merged_by(merger)}. {'; '.join(p.tip for p in points)}.",
    )


def drift_figures(runs: Sequence[Path]) -> list[Figure]:
    """Drift by block: of one run a panel for each task, of several one for each run."""
    calibration, held_out = [], []
    for run, label in labels(runs).items():
        for row, records, later in calibration_logs(run):
            title = row if len(runs) == 1 else f"{label}: {row}"
            calibration += _drift_panels(title, records, len(runs) == 1)
            lines = [_UNREPAIRED, BlockLine(row, "held_out_drift", marks([row], None)[row])]
            held_out += block_panels(title, later, lines, "drift / norm", len(runs) == 1)
    figures = [
        Figure("Drift of each block's output, before and after its own calibration", calibration,
               "The distance to the expert's features on the calibration samples, at all "
               "positions, divided by their norm where the log has it. All blocks before are "
               "calibrated."),
        Figure("Drift of held-out samples after each block", held_out,
               "The distance to the expert's features at the positions that the head reads, "
               "divided by their norm."),
    ]  # fmt: skip
    return [figure for figure in figures if figure.panels]


def _drift_panels(title: str, records: _Records, tasks: bool) -> list[Panel]:
    keys = [f"relative_drift_{moment}" for moment in MOMENTS]
    relative = all(record.get(key) is not None for record in records for key in keys)
    prefix, label = ("relative_drift", "drift / norm") if relative else ("drift", "drift, L2")
    lines = [
        BlockLine(moment, f"{prefix}_{moment}", {"color": colour, "marker": shape})
        for moment, colour, shape in zip(MOMENTS, (MERGED, CALIBRATED), "so", strict=True)
    ]
    return block_panels(title, records, lines, label, tasks)


def block_panels(
    title: str, records: _Records, lines: Sequence[BlockLine], label: str, tasks: bool
) -> list[Panel]:
    """A panel of the mean over tasks and, if asked for, one for each task, on the same axes."""
    if not records:
        return []
    blocks = list(dict.fromkeys(record["block"] for record in records))
    names = short_names(list(dict.fromkeys(record["task"] for record in records)))
    x = Axis.names(short_blocks(blocks), "block")
    values = [float(record[line.key]) for record in records for line in lines]
    y = Axis.linear(values, label, zero=True)
    panels = {f"{title}, {_MEAN}" if len(names) > 1 else title: records}
    if tasks and len(names) > 1:
        for task, name in names.items():
            panels[f"{title}, {name}"] = [r for r in records if r["task"] == task]
    return [block_panel(name, x, y, blocks, of, lines) for name, of in panels.items()]


def block_panel(
    title: str,
    x: Axis,
    y: Axis,
    blocks: Sequence[str],
    records: _Records,
    lines: Sequence[BlockLine],
) -> Panel:
    """Lines over blocks; of several records of a block their mean."""
    series, ends = [], []
    for line in lines:
        drifts: dict[str, dict[str, float]] = {}
        for record in records:
            # A task's last record of a block counts, as in the figures of `featcal plot`.
            drifts.setdefault(record["block"], {})[record["task"]] = float(record[line.key])
        means = {block: fmean(tasks.values()) for block, tasks in drifts.items()}
        points = [
            Point(place, means[block], f"{line.name}, {block}: {means[block]:.3f}")
            for place, block in enumerate(blocks)
            if block in means
        ]
        series.append(Series(line.name, line.look, points, joined=True))
        ends.append(f"{line.name} from {points[0].y:.3f} to {points[-1].y:.3f}")
    description = f"{y.label} by block, {title}, from the first block to the last: "
    return Panel(title, x, y, series, f"{description}{'; '.join(ends)}.", height=210)
