"""Figures of one run: accuracy per task, and drift per block before and after calibration.

matplotlib comes with the extra `plots` and is imported only when a figure is drawn.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .curves import convergence_figure, load_curves
from .drawing import (
    CALIBRATED,
    MERGED,
    RULE,
    legend_below,
    marks,
    new_figure,
    save_figure,
    style,
)
from .files import LOG_DIR_SETTING, ReportError, prepare_directory, read_lines
from .layout import NUMBER, check_types
from .names import AVERAGE, BASE, EXPERTS, FEATCAL
from .report import Report
from .tables import short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The log of `featcal` has this stem; that of `featcal:<preset>` adds `.<preset>`.
CALIBRATION_LOG = "calibration_log"
_MOMENTS = ("before", "after")
_DRIFTS = [f"{kind}_{moment}" for kind in ("drift", "relative_drift") for moment in _MOMENTS]
_RECORD = {"task": (str,), "block": (str,), **dict.fromkeys(_DRIFTS, (*NUMBER, None))}


def plot_run(run: str | Path, out: str | Path | None = None, setting: str = "--out") -> list[Path]:
    """Draw every figure that the run's files allow.

    Args:
        run: Log directory of a run.
        out: Folder for the figures; the run's own by default.
        setting: The setting that chose `out`, named in error messages.

    Returns:
        The files written: `accuracy.{png,svg}`; where drift was logged `drift.{png,svg}` and
        `drift.<preset>.{png,svg}`; where methods were trained `convergence.{png,svg}`.

    Raises:
        ReportError: matplotlib is missing, the run's files are damaged, or a figure cannot be
            written.
    """
    run = Path(run)
    report = Report.load(run)
    title = f"{report.suite}, merged by {report.upstream}" if report.upstream else report.suite
    figures = {"accuracy": accuracy_figure(report, title)}
    for log in sorted(run.glob(f"{CALIBRATION_LOG}*.jsonl")):
        preset = log.stem.removeprefix(CALIBRATION_LOG)
        records = drift_records(log)
        if records:
            row = FEATCAL + preset.replace(".", ":", 1)
            figures[f"drift{preset}"] = drift_figure(records, f"{title}: {row}")
    curves = load_curves(run)
    if curves:
        figures["convergence"] = convergence_figure(curves, title)
    setting = setting if out else LOG_DIR_SETTING
    directory = prepare_directory(out or run, setting)
    written = [save_figure(figure, directory / name, setting) for name, figure in figures.items()]
    return [path for paths in written for path in paths]


def accuracy_figure(report: Report, title: str = "") -> "Figure":
    """One line per task, one mark per row of the report; a bar spans the merged-to-expert gap.

    Raises:
        ReportError: matplotlib is missing or the report has no rows.
    """
    if not report.rows:
        raise ReportError("the report has no rows to draw")
    keys = [*report.tasks, AVERAGE]
    names = {**short_names(report.tasks), AVERAGE: AVERAGE}
    # The average stands apart, below the tasks.
    heights = {key: float(-line) for line, key in enumerate(keys)}
    heights[AVERAGE] -= 0.4
    with style():
        shifts, spacing = _shifts(report)
        figure = new_figure(7.2, 1.5 + spacing * len(keys))
        axes = figure.subplots()
        _draw_gaps(axes, report, heights)
        for name, look in marks(list(report.rows), report.upstream).items():
            values = [100 * report.rows[name][key] for key in keys]
            lines = [height + shifts[name] for height in heights.values()]
            label = f"{name} ({values[-1]:.1f})"
            axes.plot(values, lines, linestyle="none", label=label, **look)
        axes.axhline(heights[AVERAGE] + 0.7, color=RULE, linewidth=0.8)
        axes.set_yticks(list(heights.values()), [names[key] for key in keys])
        axes.get_yticklabels()[-1].set_fontweight("bold")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=RULE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("accuracy, %")
        axes.set_ylim(heights[AVERAGE] - 0.6, 0.6)
        axes.set_title(title)
        legend_below(figure, *axes.get_legend_handles_labels(), "row (average)")
    return figure


def drift_figure(records: Sequence[Mapping[str, Any]], title: str = "") -> "Figure":
    """Drift of each block's output before and after its own calibration: mean and single tasks.

    Relative drift is drawn where the records have it, absolute drift otherwise.

    Args:
        records: What `drift_records` returns.
        title: Title of the figure.

    Raises:
        ReportError: matplotlib is missing or there are no records.
    """
    if not records:
        raise ReportError("there is no drift to draw: the run was made with log_drift=false")
    keys = [f"relative_drift_{moment}" for moment in _MOMENTS]
    relative = all(record.get(key) is not None for record in records for key in keys)
    prefix = "relative_drift" if relative else "drift"
    blocks = list(dict.fromkeys(record["block"] for record in records))
    with style():
        figure = new_figure(max(4.8, min(12.0, 2.4 + 0.36 * len(blocks))), 3.8)
        axes = figure.subplots()
        for moment, colour, marker in (("before", MERGED, "s"), ("after", CALIBRATED, "o")):
            _draw_drift(axes, records, blocks, f"{prefix}_{moment}", (moment, colour, marker))
        axes.set_xticks(range(len(blocks)), _short_blocks(blocks))
        if max(map(len, _short_blocks(blocks))) > 3:
            axes.tick_params(axis="x", labelrotation=60)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=RULE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("block")
        axes.set_ylabel("drift / expert's norm" if relative else "drift, L2")
        axes.set_title(title)
        legend_below(
            figure,
            *axes.get_legend_handles_labels(),
            "each block's own calibration (bold: mean over tasks)",
        )
    return figure


def drift_records(path: str | Path) -> list[dict[str, Any]]:
    """Read the records with drift from a calibration log (one JSON object a line).

    Raises:
        ReportError: The file cannot be read or a line of it is damaged.
    """
    records = []
    for number, record in enumerate(read_lines(Path(path)), start=1):
        place = f"{path}, line {number}"
        check_types(record, _RECORD, place)
        if record.get("drift_before") is not None and record.get("drift_after") is not None:
            if not {"task", "block"} <= record.keys():
                raise ReportError(f"{place} names no task and block")
            records.append(record)
    return records


def _draw_gaps(axes: "Axes", report: Report, heights: Mapping[str, float]) -> None:
    merged, experts = report.rows.get(report.upstream or ""), report.rows.get(EXPERTS)
    if merged is None or experts is None:
        return
    for key, height in heights.items():
        ends = [100 * merged[key], 100 * experts[key]]
        axes.plot(ends, [height, height], color=RULE, linewidth=5, solid_capstyle="butt")


def _shifts(report: Report) -> tuple[dict[str, float], float]:
    """How far each row's marks leave the line of their task, so that equal values stay visible.

    Returns:
        The shifts, in distances of two tasks' lines, and that distance in inches.
    """
    references = (BASE, EXPERTS, report.upstream)
    shifted = [name for name in report.rows if name not in references]
    crowd = max(len(shifted) - 3, 0)
    reach = min(0.12 + 0.05 * crowd, 0.38) if len(shifted) > 1 else 0.0
    step = 2 * reach / max(len(shifted) - 1, 1)
    shifts = {name: reach - step * place for place, name in enumerate(shifted)}
    return {name: shifts.get(name, 0.0) for name in report.rows}, 0.34 + 0.06 * crowd


def _draw_drift(
    axes: "Axes",
    records: Sequence[Mapping[str, Any]],
    blocks: Sequence[str],
    key: str,
    look: tuple[str, str, str],
) -> None:
    moment, colour, marker = look
    curves: dict[str, dict[str, float]] = {}
    for record in records:
        curves.setdefault(record["task"], {})[record["block"]] = float(record[key])
    for curve in curves.values():
        heights = [curve.get(block, float("nan")) for block in blocks]
        axes.plot(heights, color=colour, linewidth=0.8, alpha=0.35)
    means = []
    for block in blocks:
        values = [curve[block] for curve in curves.values() if block in curve]
        means.append(sum(values) / len(values))
    axes.plot(means, color=colour, linewidth=2.2, marker=marker, markersize=6,
              markeredgecolor="white", label=moment)  # fmt: skip


def _short_blocks(blocks: Sequence[str]) -> list[str]:
    """Drop the parts that all block names share: `encoder.layers.3` among layers becomes `3`."""
    parts = [block.split(".") for block in blocks]
    if len(blocks) < 2 or len(set(map(len, parts))) > 1:
        return list(blocks)
    kept = [place for place, words in enumerate(zip(*parts, strict=True)) if len(set(words)) > 1]
    return [".".join(words[place] for place in kept) for words in parts]
