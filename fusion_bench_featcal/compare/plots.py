"""Figures of one run: accuracy per task, and drift per block before and after calibration.

matplotlib comes with the extra `plots` and is imported only when a figure is drawn.
"""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import LOG_DIR_SETTING, ReportError, prepare_directory, write_atomic
from .names import AVERAGE, BASE, EXPERTS, FEATCAL
from .report import Report
from .tables import short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The log of `featcal` has this stem; that of `featcal:<preset>` adds `.<preset>`.
CALIBRATION_LOG = "calibration_log"
FORMATS = ("png", "svg")

# Okabe and Ito's colours, told apart with every common colour blindness; markers differ as well.
_GREY, _INK, _RULE = "#8c8c8c", "#222222", "#d9d9d9"
_MERGED, _CALIBRATED = "#d55e00", "#0072b2"
_FURTHER = (
    ("#009e73", "D"),
    ("#cc79a7", "^"),
    ("#e69f00", "v"),
    ("#56b4e9", "P"),
    ("#7a5195", "X"),
)
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    # With a fixed salt the same run gives the same SVG.
    "svg.hashsalt": "featcal",
}


def plot_run(run: str | Path, out: str | Path | None = None, setting: str = "--out") -> list[Path]:
    """Draw every figure that the run's files allow.

    Args:
        run: Log directory of a run.
        out: Folder for the figures; the run's own by default.
        setting: The setting that chose `out`, named in error messages.

    Returns:
        The files written: `accuracy.{png,svg}`, and where drift was logged `drift.{png,svg}` and
        `drift.<preset>.{png,svg}`.

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
    setting = setting if out else LOG_DIR_SETTING
    directory = prepare_directory(out or run, setting)
    written = [_save(figure, directory / name, setting) for name, figure in figures.items()]
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
    with _style():
        figure = _figure(7.2, 1.5 + 0.34 * len(keys))
        axes = figure.subplots()
        _draw_gaps(axes, report, heights)
        shifts = _shifts(report)
        for name, marks in _row_marks(report).items():
            values = [100 * report.rows[name][key] for key in keys]
            lines = [height + shifts[name] for height in heights.values()]
            label = f"{name} ({values[-1]:.1f})"
            axes.plot(values, lines, linestyle="none", label=label, **marks)
        axes.axhline(heights[AVERAGE] + 0.7, color=_RULE, linewidth=0.8)
        axes.set_yticks(list(heights.values()), [names[key] for key in keys])
        axes.get_yticklabels()[-1].set_fontweight("bold")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=_RULE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("accuracy, %")
        axes.set_ylim(heights[AVERAGE] - 0.6, 0.6)
        axes.set_title(title)
        _legend_below(figure, axes, "row (average)")
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
    relative = all(record.get("relative_drift_before") is not None for record in records)
    prefix = "relative_drift" if relative else "drift"
    blocks = list(dict.fromkeys(record["block"] for record in records))
    with _style():
        figure = _figure(max(4.8, min(12.0, 2.4 + 0.36 * len(blocks))), 3.8)
        axes = figure.subplots()
        for moment, colour, marker in (("before", _MERGED, "s"), ("after", _CALIBRATED, "o")):
            _draw_drift(axes, records, blocks, f"{prefix}_{moment}", (moment, colour, marker))
        axes.set_xticks(range(len(blocks)), _short_blocks(blocks))
        if max(map(len, _short_blocks(blocks))) > 3:
            axes.tick_params(axis="x", labelrotation=60)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=_RULE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("block")
        axes.set_ylabel("drift / expert's norm" if relative else "drift, L2")
        axes.set_title(title)
        _legend_below(figure, axes, "each block's own calibration (bold: mean over tasks)")
    return figure


def drift_records(path: str | Path) -> list[dict[str, Any]]:
    """Read the records with drift from a calibration log (one JSON object a line).

    Raises:
        ReportError: The file cannot be read or a line of it is damaged.
    """
    records = []
    try:
        for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ReportError(f"{path}, line {number} is not a record")
            if record.get("drift_before") is not None and record.get("drift_after") is not None:
                records.append(record)
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} is damaged: {error}") from error
    return records


def _draw_gaps(axes: "Axes", report: Report, heights: Mapping[str, float]) -> None:
    merged, experts = report.rows.get(report.upstream or ""), report.rows.get(EXPERTS)
    if merged is None or experts is None:
        return
    for key, height in heights.items():
        ends = [100 * merged[key], 100 * experts[key]]
        axes.plot(ends, [height, height], color=_RULE, linewidth=5, solid_capstyle="butt")


def _shifts(report: Report) -> dict[str, float]:
    """How far each row's marks leave the line of their task, so that equal values stay visible."""
    references = (BASE, EXPERTS, report.upstream)
    shifted = [name for name in report.rows if name not in references]
    step = 0.24 / max(len(shifted) - 1, 1)
    shifts = {name: 0.12 - step * place for place, name in enumerate(shifted)}
    return {name: shifts.get(name, 0.0) if len(shifted) > 1 else 0.0 for name in report.rows}


def _row_marks(report: Report) -> dict[str, dict[str, Any]]:
    """Row -> colour and shape: references sober, merged and calibrated in fixed colours."""
    common = {"markersize": 8, "markeredgecolor": "white", "markeredgewidth": 0.8}
    fixed = {
        BASE: {"color": _GREY, "marker": "x", "markeredgecolor": _GREY, "markeredgewidth": 1.6},
        EXPERTS: {"color": _INK, "marker": "|", "markersize": 14, "markeredgecolor": _INK,
                  "markeredgewidth": 2.2},
    }  # fmt: skip
    if report.upstream:
        fixed[report.upstream] = {"color": _MERGED, "marker": "s"}
    marks, further = {}, 0
    for name in report.rows:
        if name in fixed:
            own = fixed[name]
        elif name == FEATCAL:
            own = {"color": _CALIBRATED, "marker": "o", "markersize": 9}
        else:
            colour, marker = _FURTHER[further % len(_FURTHER)]
            own, further = {"color": colour, "marker": marker}, further + 1
        marks[name] = {**common, **own}
    return marks


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


def _legend_below(figure: "Figure", axes: "Axes", title: str) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = min(3, len(labels))
    legend = figure.legend(
        handles, labels, loc="outside lower left", ncols=columns, title=title, fontsize=9
    )
    legend.set_alignment("left")


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ReportError(
            "figures need matplotlib: pip install 'fusion-bench-featcal[plots]'"
        ) from error
    return matplotlib


def _style() -> Any:
    return _matplotlib().rc_context(_STYLE)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: "Figure", stem: Path, setting: str) -> list[Path]:
    paths = []
    for kind in FORMATS:
        buffer = io.BytesIO()
        # A date would make every SVG differ.
        metadata = {"Date": None} if kind == "svg" else {}
        with _style():
            figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
        paths.append(
            write_atomic(stem.with_name(f"{stem.name}.{kind}"), buffer.getvalue(), setting)
        )
    return paths
