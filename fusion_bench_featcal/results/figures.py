"""Figures of one run: accuracy per task, drift per block, and losses of trainings."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.files import ReportError

from .curves import MOMENTS, Curves, drift_records, held_out_records, load_curves
from .diagnosis import DIAGNOSIS_FILE, Diagnosis
from .diagnosis_figures import diagnosis_figures
from .drawing import (
    CALIBRATED,
    MERGED,
    PALETTE,
    RULE,
    legend_below,
    marks,
    new_figure,
    panels,
    save_figures,
    style,
)
from .long_table import AVERAGE, EXPERTS, FEATCAL, file_suffix, is_repair, merged_by
from .report import Report
from .tables import short_blocks, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The log of `featcal` has this stem; that of `featcal:<preset>` adds `.<preset>`.
CALIBRATION_LOG = "calibration_log"
_DASHES = ("-", "--", ":", "-.")


def plot_run(run: str | Path, out: str | Path | None = None, setting: str = "--out") -> list[Path]:
    """Draw every figure that a run's files allow, into `out` or its own folder; return the files.

    These are `accuracy` where models were evaluated; where drift was logged `drift` and
    `drift.<preset>`; where samples were held out `depth`; where methods were trained
    `convergence`; of `method=diagnose` those of
    `diagnosis_figures`.
    """
    run = Path(run)
    report = Report.load(run)
    title = f"{report.suite}, {merged_by(report.upstream)}" if report.upstream else report.suite
    figures = {"accuracy": accuracy_figure(report, title)} if report.rows else {}
    held_out: dict[str, list[dict[str, Any]]] = {}
    for row, records, later in calibration_logs(run):
        if records:
            figures[f"drift{file_suffix(row)}"] = drift_figure(records, f"{title}: {row}")
        if later:
            held_out[row] = later
    if held_out:
        figures["depth"] = depth_figure(held_out, title)
    if curves := load_curves(run):
        figures["convergence"] = convergence_figure(curves, title)
    if (run / DIAGNOSIS_FILE).exists():
        figures |= diagnosis_figures(Diagnosis.load(run))
    return save_figures(figures, run, out, setting)


def calibration_logs(run: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield each calibrated row of a run, its records of drift and those of held-out samples."""
    for log in sorted(run.glob(f"{CALIBRATION_LOG}*.jsonl")):
        row = FEATCAL + log.stem.removeprefix(CALIBRATION_LOG).replace(".", ":", 1)
        yield row, drift_records(log), held_out_records(log)


def accuracy_figure(report: Report, title: str = "") -> "Figure":
    """One line per task, one mark per row of the report; a bar spans the merged-to-expert gap."""
    if not report.rows:
        raise ReportError("the report has no rows to draw")
    keys = [*report.tasks, AVERAGE]
    # The average stands apart, below the tasks.
    heights = {key: -line - 0.4 * (key == AVERAGE) for line, key in enumerate(keys)}
    merged, experts = report.rows.get(report.upstream or ""), report.rows.get(EXPERTS)
    with style():
        shifts, spacing = _shifts(report)
        figure = new_figure(7.2, 1.5 + spacing * len(keys))
        axes = figure.subplots()
        for key, height in heights.items():
            if merged is None or experts is None:
                break
            ends = [100 * merged[key], 100 * experts[key]]
            axes.plot(ends, [height] * 2, color=RULE, linewidth=5, solid_capstyle="butt")
        for name, look in marks(list(report.rows), report.upstream).items():
            values = [100 * report.rows[name][key] for key in keys]
            lines = [height + shifts.get(name, 0.0) for height in heights.values()]
            label = f"{name} ({values[-1]:.1f})"
            axes.plot(values, lines, linestyle="none", label=label, **look)
        axes.axhline(heights[AVERAGE] + 0.7, color=RULE, linewidth=0.8)
        axes.set_yticks(list(heights.values()), [*short_names(report.tasks).values(), AVERAGE])
        axes.get_yticklabels()[-1].set_fontweight("bold")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("accuracy, %")
        axes.set_ylim(heights[AVERAGE] - 0.6, 0.6)
        axes.set_title(title)
        legend_below(figure, *axes.get_legend_handles_labels(), "row (average)")
    return figure


def _shifts(report: Report) -> tuple[dict[str, float], float]:
    """Shifts of rows' marks off the line of their task, so that equal values stay visible.

    They are in units of the distance of two tasks' lines, which is returned in inches.
    """
    shifted = [name for name in report.rows if is_repair(name, report.upstream)]
    crowd = max(len(shifted) - 3, 0)
    reach = min(0.12 + 0.05 * crowd, 0.38) if len(shifted) > 1 else 0.0
    step = 2 * reach / max(len(shifted) - 1, 1)
    return {name: reach - step * place for place, name in enumerate(shifted)}, 0.34 + 0.06 * crowd


def drift_figure(records: Sequence[Mapping[str, Any]], title: str = "") -> "Figure":
    """Drift of each block's output before and after its own calibration: mean and single tasks.

    Relative drift is drawn where the records have it, absolute drift otherwise.
    """
    if not records:
        raise ReportError("there is no drift to draw: the run was made with log_drift=false")
    keys = [f"relative_drift_{moment}" for moment in MOMENTS]
    relative = all(record.get(key) is not None for record in records for key in keys)
    prefix = "relative_drift" if relative else "drift"
    looks = zip(MOMENTS, (MERGED, CALIBRATED), "so", strict=True)
    return _block_figure(
        [(name, records, f"{prefix}_{name}", colour, mark) for name, colour, mark in looks],
        title,
        "drift / expert's norm" if relative else "drift, L2",
        "each block's own calibration; calibration samples, all positions (bold: mean over tasks)",
    )


def depth_figure(rows: Mapping[str, Sequence[Mapping[str, Any]]], title: str = "") -> "Figure":
    """Drift of held-out samples after each block, of the merged model and every row.

    Args:
        rows: Records of a calibration log that have it, by row.
        title: Title.
    """
    first = next(iter(rows.values()), ())
    if not first:
        raise ReportError("there is no drift to draw: the run was made with held_out=0")
    lines = [("merged", first, "held_out_drift_merged", MERGED, "s")]
    for name, look in marks(list(rows), None).items():
        lines.append((name, rows[name], "held_out_drift", look["color"], look["marker"]))
    legend = (
        "after each block; held-out calibration samples, at the positions that the head reads "
        "(bold: mean over tasks)"
    )
    return _block_figure(lines, title, "drift / expert's norm", legend)


def _block_figure(
    lines: Sequence[tuple[str, Sequence[Mapping[str, Any]], str, str, str]],
    title: str,
    label: str,
    legend: str,
) -> "Figure":
    """Draw lines over blocks, given each one's name, records, their key, colour and mark."""
    blocks = list(dict.fromkeys(record["block"] for record in lines[0][1]))
    labels = short_blocks(blocks)
    with style():
        figure = new_figure(max(4.8, min(12.0, 2.4 + 0.36 * len(blocks))), 3.8)
        axes = figure.subplots()
        for name, records, key, colour, mark in lines:
            _draw_drift(axes, records, blocks, key, colour)
            axes.lines[-1].set(label=name, marker=mark)
        axes.set_xticks(range(len(blocks)), labels)
        if max(map(len, labels)) > 3:
            axes.tick_params(axis="x", labelrotation=60)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        axes.set_xlabel("block")
        axes.set_ylabel(label)
        axes.set_title(title)
        legend_below(figure, *axes.get_legend_handles_labels(), legend)
    return figure


def _draw_drift(
    axes: "Axes", records: Sequence[Mapping[str, Any]], blocks: Sequence[str], key: str, colour: str
) -> None:
    """Draw a thin line for each task and, last, the mean over tasks."""
    curves: dict[str, dict[str, float]] = {}
    for record in records:
        curves.setdefault(record["task"], {})[record["block"]] = float(record[key])
    for curve in curves.values():
        heights = [curve.get(block, float("nan")) for block in blocks]
        axes.plot(heights, color=colour, linewidth=0.8, alpha=0.35)
    columns = [[curve[block] for curve in curves.values() if block in curve] for block in blocks]
    means = [sum(values) / len(values) for values in columns]
    axes.plot(means, color=colour, linewidth=2.2, markersize=6, markeredgecolor="white")


def convergence_figure(curves: Mapping[str, Curves], title: str = "") -> "Figure":
    """A panel for each trained method, a line for each task: its loss, relative to step 0."""
    if not curves:
        raise ReportError("there are no training curves to draw: no method of the run trains")
    tasks = list(dict.fromkeys(task for rows in curves.values() for task in rows))
    names = short_names(tasks)
    with style():
        figure, grid = panels(list(curves), (2.9, 2.4), 3, title, "updates", sharex=False)
        lines: dict[str, Any] = {}
        for axes, rows in zip(grid, curves.values(), strict=True):
            for task, points in rows.items():
                steps, losses = zip(*points, strict=True)
                # A task has the same colour and dashes in every panel.
                turn, colour = divmod(tasks.index(task), len(PALETTE))
                (lines[names[task]],) = axes.plot(
                    steps, [loss / (losses[0] or 1.0) for loss in losses], linewidth=1.5,
                    color=PALETTE[colour], linestyle=_DASHES[turn % len(_DASHES)],
                )  # fmt: skip
            axes.set_ylim(bottom=0)
            axes.set_xlim(left=0)
        figure.supylabel("loss / loss before training", fontsize=10)
        legend_below(figure, list(lines.values()), list(lines), "", min(len(curves), 3) + 2)
    return figure
