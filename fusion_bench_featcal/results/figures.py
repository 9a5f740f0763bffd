"""Figures in matplotlib: values by category, and curves along an axis.

The marks of all models have equal areas and lines, and are hollow, so that intervals are visible in
front of them. References and FeatCal's models have fixed colours and shapes. Other models take the
next of a list. Figures have a white background. matplotlib comes with the extra `lab` and is only
imported for drawing.
"""

import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.errors.words import install_advice
from fusion_bench_featcal.files import prepare_directory, write_atomic

from .columns import AVERAGE
from .frame import Frame, FrameLine
from .names import BASE, MERGED
from .tables import Unit, without_codes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _GREY = "#222222", "#8c8c8c"
_LOOKS = {
    "base": ("#7a7a7a", "X"), "experts": (_INK, "P"), MERGED: ("#6b6b6b", "s"),
    "featcal": ("#0072b2", "o"), "featcal_plus": ("#c2410c", "D"),
}  # fmt: skip
"""Colour and shape of models. Shapes differ, too, for readers with colour blindness."""
_OTHER_COLOURS = ("#00795c", "#a03c78", "#8a6100", "#5b4db1", "#00798c")
_OTHER_MARKS = ("^", "v", "<", ">", "p", "h")
_SIZES = (
    dict.fromkeys("sD", 5.3) | {"o": 6.0} | dict.fromkeys("phPX", 6.8) | dict.fromkeys("^v<>", 7.0)
)
"""Sizes of marks with nearly equal areas."""
_STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": _GREY,
    "grid.alpha": 0.35, "grid.linewidth": 0.5, "legend.frameon": False,
    "figure.constrained_layout.use": True, "savefig.facecolor": "white",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor",
                     "xtick.color", "ytick.color"), _INK),
    "text.parse_math": False,  # dollar signs in names are characters
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # fonts that editors can change
    "svg.hashsalt": "featcal",  # equal figures give equal files
}  # fmt: skip
_BARS: dict[str, Any] = {"elinewidth": 1.1, "capsize": 2, "barsabove": True}


class ErrorBar(NamedTuple):
    """A number with the lengths of its interval below and above, 0 without one."""

    mean: float
    below: float = 0.0
    above: float = 0.0


Panels = Mapping[str, Mapping[str, Mapping[Any, ErrorBar]]]
"""Panel -> model -> category or position -> value."""


def figures_of(frame: Frame, width: float | None = None) -> "dict[str, Figure]":
    """Draw a frame: its metric by task, or the average along settings with numbers.

    Bars are 95 % intervals of the values, over test examples and from three seeds on over seeds.
    Without a width in inches, figures are as wide as their panels need.
    """
    metric, suites = frame.metric, frame.by_suite()
    unit = f"{metric}, %" if Unit.of(metric).factor == 100 else metric
    bars = "\nbars: 95 % interval" * any(line.halves for line in frame.lines)
    figures: dict[str, Figure] = {}
    for suite, suite_frame in suites.items() if frame.tasks else ():
        ending = f"-{suite}" if len(suites) > 1 else ""
        if not suite_frame.labels:
            figures[f"{metric}{ending}"] = dots(_values_by_task(suite_frame), unit + bars, width)
        for key in suite_frame.labels:
            if panels := _averages_along(suite_frame, key):
                name = f"{metric}-{key}{ending}"
                figures[name] = curves(panels, key + bars, f"average {unit}", width=width)
    return figures


def _values_by_task(frame: Frame) -> Panels:
    """Return the values of a suite's rows, a panel for each merger with repairs.

    Merged models without repairs are in every panel. The base is left out, because it is so far
    below the others that their differences would be invisible.
    """
    lines = [line for line in frame.lines if line.first.name != BASE] or frame.lines
    repaired = dict.fromkeys(line.first.merger for line in lines if line.first.is_repair)
    panels = dict[str, Any]()
    for merger in repaired or [""]:
        for line in (line for line in lines if line.first.merger not in repaired.keys() - {merger}):
            tasks = (task for task in (AVERAGE, *frame.tasks) if task in line.values)
            values = {task: estimate_of(line, task) for task in tasks}
            name = name_of(line) if line.first.merger in repaired else line.first.name
            panels.setdefault(merger, {})[name] = values
    return panels


def estimate_of(line: FrameLine, task: str = AVERAGE) -> ErrorBar:
    """Return a model's value with its interval, in the unit of its metric.

    Intervals of percentages end at 0 and 100.
    """
    unit, value, half = Unit.of(line.metric).factor, line.values[task], line.halves.get(task, 0.0)
    below, above = (min(half, value), min(half, 1 - value)) if unit == 100 else (half, half)
    return ErrorBar(unit * value, unit * below, unit * above)


def name_of(line: FrameLine) -> str:
    """Return a model's name in figures."""
    name = MERGED if line.is_merged else line.first.name
    return f"{name} (task id)" if line.needs_task_id else name


def _averages_along(frame: Frame, key: str) -> Panels:
    """Return averages along a setting, at the first values of the other settings."""
    panels = dict[str, Any]()
    lines = [line for line in frame.lines if AVERAGE in line.values and line.first.name != BASE]
    first: dict[str, Any] = {}
    for line in lines:
        first = {k: v for k, v in line.first.labels.items() if k != key} | first
    lines = [
        line
        for line in lines
        if all(first[k] == value for k, value in line.first.labels.items() if k != key)
    ]
    labels = {line.first.labels[key] for line in lines if key in line.first.labels}
    if len(labels) < 2 or not all(isinstance(label, int | float) for label in labels):
        return {}
    for merger in dict.fromkeys(line.first.merger for line in lines if line.first.merger):
        for line in (line for line in lines if line.first.merger in ("", merger)):
            # A model without the setting has the same value everywhere.
            xs = [line.first.labels[key]] if key in line.first.labels else sorted(labels)
            row_panel = panels.setdefault(merger, {}).setdefault(name_of(line), {})
            row_panel |= dict.fromkeys(xs, estimate_of(line))
    return {m: {n: dict(sorted(v.items())) for n, v in rows.items()} for m, rows in panels.items()}


# ---- charts


@contextmanager
def chart_style() -> Iterator[None]:
    """Apply the common style while figures are created and saved."""
    try:
        import matplotlib
    except ImportError as error:
        advice = install_advice("'.[lab]'")
        raise ReportError(f"figures need matplotlib: {advice}") from error
    with matplotlib.rc_context(_STYLE):
        yield


@chart_style()
def dots(panels: Panels, label: str, width: float | None = None) -> "Figure":
    """Draw values with their intervals, a line for each category.

    Args:
        panels: Panel -> model -> category -> value.
        label: Label of the horizontal axis.
        width: Width of the figure in inches, or None for that of its panels.
    """
    categories = _unique(values for rows in panels.values() for values in rows.values())
    styles = marks(_unique(panels.values()))
    height = 0.5 + len(categories) * (0.2 + 0.13 * max(map(len, panels.values())))
    figure, grid = _make_panels(panels, (2.75, height), label, width)
    for axes, rows in zip(grid, panels.values(), strict=True):
        for number, (row, values) in enumerate(rows.items()):
            shift = 0.7 * ((number + 0.5) / len(rows) - 0.5)
            heights = [categories.index(name) + shift for name in values]
            means, *lengths = zip(*values.values(), strict=True)
            bars = lengths if any(map(any, lengths)) else None
            axes.errorbar(means, heights, xerr=bars, linestyle="none",
                          **_BARS, **styles[row])  # fmt: skip
        axes.grid(visible=False, axis="y")
    _share_axis(grid, label)
    grid[0].set_yticks(range(len(categories)), categories)
    grid[0].set_ylim(len(categories) - 0.5, -0.5)
    _add_legend(figure, styles, "none")
    return figure


@chart_style()
def curves(
    panels: Panels, xlabel: str, ylabel: str, *, joined: bool = True, width: float | None = None
) -> "Figure":
    """Draw lines with intervals. An axis of positive numbers over a wide range is logarithmic.

    Args:
        panels: Panel -> model -> position (a number, or the name of a block) -> value.
        xlabel: Label of the horizontal axis.
        ylabel: Label of the vertical axis.
        joined: Draw lines between the points of a model.
        width: Width of the figure in inches, or None for that of its panels.
    """
    styles = marks(_unique(panels.values()))
    figure, grid = _make_panels(panels, (2.8, 2.3), xlabel, width)
    figure.supylabel(ylabel, fontsize=9)
    line = "-" if joined else "none"
    for axes, rows in zip(grid, panels.values(), strict=True):
        for row, values in rows.items():
            means, *lengths = zip(*values.values(), strict=True)
            bars = lengths if any(map(any, lengths)) else None
            axes.errorbar(list(values), means, yerr=bars, linewidth=1.5,
                          linestyle=line, **_BARS, **styles[row])  # fmt: skip
        _set_ticks(axes, _unique(rows.values()))
    _add_legend(figure, styles, line)
    return figure


def _share_axis(grid: "Sequence[Axes]", label: str) -> None:
    """Give all panels one horizontal axis, which begins a little below the smallest value.

    A note below the axis names a start above 0.
    """
    ends = np.concatenate([np.asarray(line.get_xdata()) for ax in grid for line in ax.get_lines()])
    lowest, highest = float(ends.min()), float(ends.max())
    step = 10 ** math.floor(math.log10(highest - lowest or 1)) / 5
    start = step * math.floor(lowest / step)
    for axes in grid:
        axes.set_xlim(start, highest + 0.03 * (highest - start or 1))
        if start > 0:
            axes.set_xlabel(f"{label}\naxis begins at {start:g}")


def _set_ticks(axes: "Axes", positions: Sequence[Any]) -> None:
    """Choose scale and ticks of a horizontal axis of names or numbers."""
    if any(isinstance(position, str) for position in positions):
        step = math.ceil(len(positions) / 8)
        axes.set_xticks(range(0, len(positions), step), positions[::step], rotation=60)
    elif min(positions) > 0 and max(positions) >= 10 * min(positions):
        axes.set_xscale("log")
        ticks = sorted(positions)[:: math.ceil(len(positions) / 6)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axes.minorticks_off()


def marks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the look of each model, as keywords of `Axes.plot`."""
    others = zip(cycle(_OTHER_COLOURS), cycle(_OTHER_MARKS), strict=False)
    styles: dict[str, dict[str, object]] = {}
    for name in names:
        colour, mark = _LOOKS[name] if name in _LOOKS else next(others)
        styles[name] = {"color": colour, "marker": mark, "markersize": _SIZES[mark],
                        "markerfacecolor": "white", "markeredgewidth": 1.1}  # fmt: skip
    return styles


def _unique(groups: Iterable[Iterable[object]]) -> list[Any]:
    """Return every name of several groups once, in order of appearance."""
    return list(dict.fromkeys(name for group in groups for name in group))


def _make_panels(
    panels: Mapping[str, object], size: tuple[float, float], xlabel: str, width: float | None
) -> "tuple[Figure, list[Axes]]":
    """Create a figure with a panel of a size in inches for each name, three side by side.

    A width of the figure changes that of its panels.
    """
    from matplotlib.figure import Figure

    if not panels:
        raise ReportError("there is nothing to draw")
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(width or 1.1 + size[0] * across, 0.5 + size[1] * down))
    grid = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes, name in zip(grid, panels, strict=False):
        axes.set_title(name)
        axes.set_xlabel(xlabel)
    return figure, grid[: len(panels)]


def _add_legend(figure: "Figure", styles: Mapping[str, Mapping[str, Any]], linestyle: Any) -> None:
    """Put a legend of the models above the panels and make room for it."""
    from matplotlib.lines import Line2D

    columns = max(1, int(12 * figure.get_figwidth() / (max(map(len, styles)) + 6)))
    handles = [Line2D([], [], linestyle=linestyle, label=r, **look) for r, look in styles.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.1 + 0.19 * math.ceil(len(styles) / columns))


def svg(figure: "Figure") -> str:
    """Return a figure as an `svg` element. Equal figures give equal texts."""
    text = _drawn(figure, "svg").decode()
    return without_codes(text[text.index("<svg") :])


def _drawn(figure: "Figure", form: str) -> bytes:
    """Return a figure as SVG or PDF, without the time."""
    buffer = io.BytesIO()
    with chart_style(), warnings.catch_warnings():
        # Text remains text, because the viewer has glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        keys = ("Date", "Creator", "Format", "Type") if form == "svg" else ("CreationDate",)
        figure.savefig(buffer, format=form, metadata=dict.fromkeys(keys))
    return buffer.getvalue()


def save_figures(
    figures: "Mapping[str, Figure]", folder: str | Path, setting: str, form: str = "svg"
) -> list[Path]:
    """Write figures as SVG or PDF files of their names into a folder, and return the files.

    Raises:
        ReportError: If there is no figure, or a file cannot be written.
    """
    if not figures:
        raise ReportError("there is nothing to draw")
    target = prepare_directory(folder, setting)
    names = {name: re.sub(r"[^-.:+ \w]", "_", name) for name in figures}
    contents = {n: svg(f) if form == "svg" else _drawn(f, form) for n, f in figures.items()}
    return [
        write_atomic(target / f"{names[name]}.{form}", content, setting)
        for name, content in contents.items()
    ]
