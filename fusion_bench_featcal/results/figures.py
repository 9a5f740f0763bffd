"""Figures of one run: accuracy per task, drift per block, and losses of trainings.

matplotlib comes with the extra `plots` and is imported only when a figure is drawn.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, prepare_directory
from fusion_bench_featcal.json_files import read_lines

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
from .long_table import AVERAGE, BASE, EXPERTS, FEATCAL
from .rendering import short_names
from .report import Report
from .validate import NUMBER, check_types

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

import math
from typing import TYPE_CHECKING

from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.json_files import sealed_lines

from .drawing import PALETTE

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
    """Shift each row's marks off the line of their task, so that equal values stay visible.

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
    differing = [n for n, words in enumerate(zip(*parts, strict=True)) if len(set(words)) > 1]
    return [".".join(words[place] for place in differing) for words in parts]


CURVES_FILE = "training_curves.jsonl"

_ACROSS = 3  # panels in a row of them
_DASHES = ("-", "--", ":", "-.")

Curves = dict[str, list[tuple[int, float]]]
"""Task -> steps done and loss, in order; step 0 is before training."""


def as_curves(content: Any, place: str) -> Curves:
    """Check curves that were read from JSON.

    Args:
        content: Task -> list of `[step, loss]`.
        place: Where they stand, for the error message.

    Raises:
        ReportError: They are something else, steps do not rise, or a loss is not finite.
    """
    try:
        curves = {
            str(task): [(int(step), float(loss)) for step, loss in points]
            for task, points in content.items()
        }
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ReportError(f"{place}: a curve is a list of [step, loss]: {error}") from error
    for task, points in curves.items():
        steps = [step for step, _ in points]
        finite = all(math.isfinite(loss) for _, loss in points)
        if not points or steps != sorted(set(steps)) or not finite:
            raise ReportError(f"{place}: task '{task}': steps must rise and losses be finite")
    return curves


def write_curves(
    directory: str | Path, curves: Mapping[str, Curves], setting: str = LOG_DIR_SETTING
) -> Path | None:
    """Write the curves of a run's rows; what an earlier run left is removed.

    Args:
        directory: An existing folder.
        curves: Row -> its curves; rows without any are left out.
        setting: The setting that chose the folder, named in error messages.

    Returns:
        The file; None where nothing was trained.

    Raises:
        ReportError: The file cannot be written.
    """
    path = Path(directory) / CURVES_FILE
    records = [
        {"name": name, "task": task, "losses": points}
        for name, tasks in curves.items()
        for task, points in tasks.items()
    ]
    if not records:
        path.unlink(missing_ok=True)
        return None
    return write_atomic(path, sealed_lines(records), setting)


def load_curves(directory: str | Path) -> dict[str, Curves]:
    """Read what `write_curves` wrote: row -> task -> (step, loss); empty where there is no file.

    Raises:
        ReportError: The file cannot be read or a line of it is damaged.
    """
    path = Path(directory) / CURVES_FILE
    if not path.exists():
        return {}
    curves: dict[str, Curves] = {}
    try:
        for record in read_lines(path):
            part = as_curves({record["task"]: record["losses"]}, str(path))
            curves.setdefault(str(record["name"]), {}).update(part)
    except (KeyError, TypeError) as error:
        raise ReportError(f"{path} is damaged: {error}") from error
    return curves


def convergence_figure(curves: Mapping[str, Curves], title: str = "") -> "Figure":
    """A panel for each trained method, a line for each task: its loss, relative to step 0.

    Args:
        curves: Row -> task -> (step, loss).
        title: Title of the figure.

    Raises:
        ReportError: matplotlib is missing or nothing was trained.
    """
    if not curves:
        raise ReportError("there are no training curves to draw: no method of the run trains")
    tasks = list(dict.fromkeys(task for rows in curves.values() for task in rows))
    across = min(len(curves), _ACROSS)
    down = -(-len(curves) // across)
    with style():
        figure = new_figure(1.0 + max(2.9 * across, 4.4), 1.2 + 2.4 * down)
        grid = figure.subplots(down, across, squeeze=False).flat
        lines: dict[str, Any] = {}
        for axes, (name, rows) in zip(grid, curves.items(), strict=False):
            lines |= _draw_trainings(axes, rows, tasks)
            axes.set_title(name, fontsize=10)
            axes.set_xlabel("updates", fontsize=9)
        for axes in grid[len(curves) :]:
            axes.remove()
        figure.supylabel("loss / loss before training", fontsize=10)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        names = short_names(tasks)
        labels = [names.get(task, task) for task in lines]
        legend_below(figure, list(lines.values()), labels, "", across + 2)
    return figure


def _draw_trainings(axes: "Axes", rows: Curves, tasks: Sequence[str]) -> dict[str, Any]:
    """One line a task; a task has the same colour in every panel."""
    lines = {}
    for task, points in rows.items():
        place = tasks.index(task)
        first = points[0][1] or 1.0
        look: dict[str, Any] = {
            "color": PALETTE[place % len(PALETTE)],
            "linestyle": _DASHES[place // len(PALETTE) % len(_DASHES)],
        }
        shares = [loss / first for _, loss in points]
        (lines[task],) = axes.plot([step for step, _ in points], shares, linewidth=1.5, **look)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
    return lines
