"""Four charts in matplotlib: dots with intervals, curves with bands, lines over blocks, heat maps.

A chart draws numbers by panel and row. A row has the same colour and mark in every chart. Text and
axes have the colour of the surrounding text, so that figures are readable in dark mode. matplotlib
comes with the extra `lab` and is only imported for drawing.
"""

import io
import math
import re
import textwrap
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.files import ReportError, prepare_directory, write_atomic
from fusion_bench_featcal.results.intervals import Interval
from fusion_bench_featcal.results.tables import without_codes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MERGED = "merged"
"""Name of the merged model's row in charts with a panel for each merger."""
BEFORE, AFTER = "before", "after"

Curve = Mapping[Any, Interval]
"""Horizontal position (a number) -> value."""

_ACROSS = 3  # panels side by side
_FAR = 10  # ratio of an axis's ends above which it is logarithmic
_LETTERS_PER_INCH = 12
# Text and axes of a figure are drawn in _INK, which `svg` replaces by the surrounding colour.
_INK, _GREY = "#222222", "#8c8c8c"
_INK_RULES = "svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#ddd}}"
# Okabe and Ito's colours, distinguishable with common colour blindness. Marks differ, too.
_BLUE, _ORANGE, _GREEN, _PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
_YELLOW, _SKY, _VIOLET, _BROWN = "#e69f00", "#56b4e9", "#7a5195", "#8c6d31"
_LOOKS = {
    "base": (_GREY, "x"),
    "experts": (_INK, "|"),
    MERGED: (_ORANGE, "s"),
    BEFORE: (_ORANGE, "s"),
    AFTER: (_BLUE, "o"),
    "featcal": (_BLUE, "o"),
    "featcal_plus": (_SKY, ">"),
    "surgery": (_GREEN, "D"),
    "prob_surgery": (_PINK, "^"),
    "ridge_surgery": (_YELLOW, "v"),
    "surgery_v2": (_VIOLET, "P"),
    "distillation": (_INK, "p"),
}
# For all other rows.
_FREE_LOOKS = list(product((_GREEN, _PINK, _YELLOW, _VIOLET, _BROWN), "<hpdv^DPX"))
_NO_FILE_NAME = re.compile(r"[^-.:+ \w]")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _GREY,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), _INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("axes.facecolor", "savefig.facecolor"), "none"),
    # Dollar signs in names are characters, not mathematics.
    "text.parse_math": False,
    "svg.fonttype": "none",
    # With a fixed salt equal figures give equal files.
    "svg.hashsalt": "featcal",
}


def marks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the colour and mark of each row, as keywords of `Axes.plot`.

    A name without a fixed style gets one from its letters, or the next one if another such row in
    `names` has that style or colour.
    """
    styles: dict[str, tuple[str, str]] = {}
    chosen: list[tuple[str, str]] = []
    for name in names:
        start = zlib.crc32(name.encode()) % len(_FREE_LOOKS)
        candidates = _FREE_LOOKS[start:] + _FREE_LOOKS[:start]
        colours = Counter(colour for colour, _ in chosen)
        free = min(candidates, key=lambda look: (look in chosen, colours[look[0]]))
        styles[name] = _LOOKS.get(name, free)
        chosen += [free] if name not in _LOOKS else []
    return {name: _keywords(*look) for name, look in styles.items()}


def _keywords(colour: str, mark: str) -> dict[str, Any]:
    is_stroke = mark in "x|"
    return {
        "color": colour,
        "marker": mark,
        "markersize": 11 if mark == "|" else 6,
        "markeredgewidth": 1.6 if is_stroke else 0.0,
    }


@contextmanager
def _style() -> Iterator[None]:
    """Apply the common style while figures are created and saved."""
    try:
        import matplotlib
    except ImportError as error:
        raise ReportError(
            "figures need matplotlib: pip install 'fusion-bench-featcal[lab]'"
        ) from error
    with matplotlib.rc_context(_STYLE):
        yield


@_style()
def dots(
    panels: Mapping[str, Mapping[str, Mapping[str, Interval]]],
    label: str,
    *,
    title: str = "",
) -> "Figure":
    """Draw values with their intervals, a line for each category.

    Args:
        panels: Panel -> row -> category -> value with its interval.
        label: Label of the horizontal axis.
        title: Title of the figure.
    """
    rows = _names(panels.values())
    categories = _names(cells for panel in panels.values() for cells in panel.values())
    present = {
        title: {c: [row for row in panel if c in panel[row]] for c in categories}
        for title, panel in panels.items()
    }
    most = max(len(names) for lines in present.values() for names in lines.values())
    size = (2.5, 0.5 + (0.18 + 0.07 * most) * len(categories))
    styles = marks(rows)
    figure, grid = _frame(list(panels), size, (label, ""), title, lines=categories)
    for axes, (name, panel) in zip(grid, panels.items(), strict=True):
        for height, category in enumerate(categories):
            for number, row in enumerate(present[name][category]):
                shift = 0.7 * ((number + 0.5) / len(present[name][category]) - 0.5)
                value = panel[row][category]
                if value.over:
                    ends = (value.low, value.high)
                    axes.hlines(height + shift, *ends, colors=styles[row]["color"], lw=1.3)
                axes.plot([value.estimate], [height + shift], linestyle="none", **styles[row])
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        for edge in range(1, len(categories)):
            axes.axhline(edge - 0.5, color=_GREY, linewidth=0.5, alpha=0.35)
    grid[0].set_yticks(range(len(categories)), categories)
    grid[0].set_ylim(len(categories) - 0.5, -0.5)
    # The axis has the rows' names if every row is a category.
    _legend(figure, styles if rows != categories else {}, "none")
    return figure


@_style()
def curves(
    panels: Mapping[str, Mapping[str, Curve]],
    xlabel: str,
    ylabel: str,
    *,
    title: str = "",
    sharex: bool = True,
) -> "Figure":
    """Draw lines with their intervals as bands, and one interval alone as a bar.

    A horizontal axis is logarithmic if its values are positive and cover a wide range.

    Args:
        panels: Panel -> row -> horizontal position -> value with its interval, in order.
        xlabel: Label of the horizontal axis.
        ylabel: Label of the vertical axis.
        title: Title of the figure.
        sharex: Give all panels the same horizontal axis.
    """
    styles = marks(_names(panels.values()))
    figure, grid = _frame(list(panels), (2.6, 2.2), (xlabel, ylabel), title, sharex=sharex)
    for axes, panel in zip(grid, panels.values(), strict=True):
        for row, points in panel.items():
            xs, values = list(points), list(points.values())
            axes.plot(xs, [v.estimate for v in values], linewidth=1.5, **styles[row])
            with_interval = {x: value for x, value in points.items() if value.over}
            lows, highs = (
                [v.low for v in with_interval.values()],
                [v.high for v in with_interval.values()],
            )
            if len(with_interval) == 1:
                axes.vlines(list(with_interval), lows, highs, colors=styles[row]["color"], lw=1.3)
            elif with_interval:
                colour = styles[row]["color"]
                axes.fill_between(list(with_interval), lows, highs, color=colour, alpha=0.18, lw=0)
        _scale(axes, panels.values() if sharex else [panel])
    _legend(figure, styles, "-")
    return figure


def _scale(axes: "Axes", panels: Iterable[Mapping[str, Curve]]) -> None:
    """Make the horizontal axis logarithmic, with plain numbers, if values cover a wide range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    lines = [points for panel in panels for points in panel.values()]
    xs = sorted({x for points in lines for x in points})
    if xs[0] <= 0 or xs[-1] < _FAR * xs[0]:
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if xs[-1] > 500 * xs[0] else (1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if len(xs) < 7 and max(map(len, lines)) > 1:
        axes.set_xticks(xs)


@_style()
def blocks(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
    ylabel: str,
    *,
    title: str = "",
) -> "Figure":
    """Draw lines over a model's blocks.

    Args:
        panels: Panel -> row -> block -> value. A row may lack blocks.
        ylabel: Label of the vertical axis.
        title: Title of the figure.
    """
    names = _names(values for panel in panels.values() for values in panel.values())
    styles = marks(_names(panels.values()))
    figure, grid = _frame(list(panels), (2.6, 2.0), ("block", ylabel), title)
    for axes, panel in zip(grid, panels.values(), strict=True):
        for row, values in panel.items():
            heights = [values.get(name, math.nan) for name in names]
            axes.plot(heights, linewidth=1.5, **{**styles[row], "markersize": 4})
    all_values = [
        v for panel in panels.values() for values in panel.values() for v in values.values()
    ]
    if min(all_values, default=0.0) >= 0:
        grid[0].set_ylim(bottom=0)
    step = math.ceil(len(names) / 8)
    grid[0].set_xticks(range(0, len(names), step), names[::step])
    if max(map(len, names)) > 3:
        for axes in grid:
            axes.tick_params(axis="x", labelrotation=60)
    _legend(figure, styles, "-")
    return figure


@_style()
def heat(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
    label: str,
    form: str = ".1f",
    *,
    title: str = "",
) -> "Figure":
    """Draw values as colours with their numbers. Colours change at 0.

    Args:
        panels: Panel -> row -> column -> value. A row may lack columns.
        label: Meaning and unit of the values.
        form: Format of the numbers.
        title: Title of the figure.
    """
    import numpy as np

    rows = _names(panels.values())
    columns = _names(cells for panel in panels.values() for cells in panel.values())
    tables = [
        np.array([[panel.get(r, {}).get(c, math.nan) for c in columns] for r in rows])
        for panel in panels.values()
    ]
    low, high = float(np.nanmin(tables)), float(np.nanmax(tables))
    if low < 0:
        high = max(-low, high)
        low = -high
    colours = "PuOr_r" if low < 0 else "cividis"
    size = (0.6 + 0.42 * len(columns), 0.5 + 0.26 * len(rows))
    figure, grid = _frame(list(panels), size, (label, ""), title, across=1, lines=rows)
    for axes, table in zip(grid, tables, strict=True):
        axes.grid(visible=False)
        mesh = axes.pcolormesh(np.ma.masked_invalid(table), cmap=colours, vmin=low, vmax=high)
        for (line, column), value in np.ndenumerate(table):
            if not math.isnan(value):
                is_dark = np.dot(mesh.to_rgba(value)[:3], (0.299, 0.587, 0.114)) < 0.5
                axes.text(column + 0.5, line + 0.5, format(value, form), ha="center", va="center",
                          fontsize=8, color="white" if is_dark else "black")  # fmt: skip
        axes.tick_params(length=0)
        if max(map(len, columns)) > 5:
            axes.tick_params(axis="x", labelrotation=60)
    grid[0].set_xticks(np.arange(len(columns)) + 0.5, columns)
    grid[0].set_yticks(np.arange(len(rows)) + 0.5, rows)
    grid[0].set_ylim(len(rows), 0)
    return figure


def _names(groups: Iterable[Iterable[str]]) -> list[str]:
    """Return every name of some groups once, in order of appearance."""
    return list(dict.fromkeys(name for group in groups for name in group))


def _frame(
    titles: Sequence[str],
    size: tuple[float, float],
    labels: tuple[str, str],
    title: str,
    *,
    across: int = _ACROSS,
    sharex: bool = True,
    lines: Sequence[str] = (),
) -> "tuple[Figure, list[Axes]]":
    """Create a figure of panels with a size in inches and common axis labels.

    `lines` are names next to the first panel, which get additional space.
    """
    from matplotlib.figure import Figure

    if not titles:
        raise ReportError("there is nothing to draw")
    across = min(across, len(titles))
    down = math.ceil(len(titles) / across)
    margin = 0.3 + max(map(len, lines), default=0) / _LETTERS_PER_INCH
    width = max(1.1, margin) + size[0] * across
    heading = textwrap.fill(title, int(_LETTERS_PER_INCH * width))
    height = 0.4 + 0.2 * len(heading.splitlines()) + size[1] * down
    figure = Figure(figsize=(width, height))
    figure.suptitle(heading, x=0.01, ha="left", fontsize=10)
    figure.supylabel(labels[1], fontsize=9)
    grid = list(figure.subplots(down, across, squeeze=False, sharex=sharex, sharey=True).flat)
    for axes in grid[len(titles) :]:
        axes.remove()
    for number, (axes, name) in enumerate(zip(grid, titles, strict=False)):
        axes.set_title(name)
        is_lowest = number + across >= len(titles)
        axes.set_xlabel(labels[0] if is_lowest else "")
        axes.tick_params(labelbottom=is_lowest or not sharex)
    return figure, grid[: len(titles)]


def _legend(figure: "Figure", styles: Mapping[str, Mapping[str, Any]], linestyle: Any) -> None:
    """Put a legend of rows below the panels and make room for it."""
    from matplotlib.lines import Line2D

    if len(styles) < 2:
        return
    letters = _LETTERS_PER_INCH * figure.get_figwidth()
    columns = max(1, int(letters / (max(map(len, styles)) + 6)))
    handles = [Line2D([], [], linestyle=linestyle, label=r, **look) for r, look in styles.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.1 + 0.19 * math.ceil(len(styles) / columns))


def svg(figure: "Figure") -> str:
    """Return a figure as an `svg` element. Equal figures give equal texts."""
    buffer = io.StringIO()
    with _style(), warnings.catch_warnings():
        # Text remains text, because the viewer has glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    return without_codes(text.replace("</style>", f"{_INK_RULES}</style>", 1))


def save(figures: "Mapping[str, Figure]", folder: str | Path, setting: str) -> list[Path]:
    """Write figures as SVG files of their names into a folder, and return the files.

    Args:
        figures: Name -> figure.
        folder: The folder, which is created.
        setting: The setting that chose the folder, for messages.

    Raises:
        ReportError: If there is no figure, or a file cannot be written.
    """
    if not figures:
        raise ReportError("there is nothing to draw")
    target = prepare_directory(folder, setting)
    files = {target / f"{_NO_FILE_NAME.sub('_', name)}.svg": figures[name] for name in figures}
    return [write_atomic(path, svg(figure), setting) for path, figure in files.items()]
