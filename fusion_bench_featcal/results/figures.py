"""Figures in matplotlib: values by category, and curves along an axis.

A row has the same colour and mark in every figure. Text and axes have the colour of the surrounding
text, so that figures are readable in dark mode. matplotlib comes with the extra `lab` and is only
imported for drawing.
"""

import io
import math
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.files import prepare_directory, write_atomic

from .run import AVERAGE, BASE
from .show import Unit, is_at, is_missing, points_of, short_names, tasks_of
from .tables import without_codes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MERGED = "merged"
"""Name of the merged model's row in figures with a panel for each merger."""

# Text and axes of a figure are drawn in _INK, which `svg` replaces by the surrounding colour.
_INK, _GREY = "#222222", "#8c8c8c"
_INK_RULES = "svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#ddd}}"
# Okabe and Ito's colours, distinguishable with common colour blindness. Marks differ, too.
_LOOKS = {
    "base": (_GREY, "x"), "experts": (_INK, "*"), MERGED: ("#d55e00", "s"),
    "featcal": ("#0072b2", "o"), "featcal_plus": ("#56b4e9", ">"),
}  # fmt: skip
_FREE_LOOKS = list(product(("#009e73", "#cc79a7", "#e69f00", "#7a5195", "#8c6d31"), "<hpdv^DP"))
_STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": _GREY,
    "grid.alpha": 0.35, "grid.linewidth": 0.5, "legend.frameon": False,
    "figure.constrained_layout.use": True, "axes.facecolor": "none", "savefig.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor",
                     "xtick.color", "ytick.color"), _INK),
    "text.parse_math": False,  # dollar signs in names are characters
    "svg.fonttype": "none",
    "svg.hashsalt": "featcal",  # equal figures give equal files
}  # fmt: skip


class Value(NamedTuple):
    """A number with half of its interval, or 0 without one."""

    mean: float
    half: float = 0.0


Panels = Mapping[str, Mapping[str, Mapping[Any, Value]]]
"""Panel -> row -> category or position -> value."""


def figures_of(frame: Any) -> "dict[str, Figure]":
    """Draw a frame of `summary`: its metric by task, or the average along labels with numbers.

    Bars are half of the 95 % interval of the gain over the merged model.
    """
    metric, labels = frame.attrs["metric"], frame.attrs["labels"]
    unit = f"{metric}, %" if Unit.of(metric).factor == 100 else metric
    if not tasks_of(frame):
        return {}
    if not labels:
        return {
            f"{metric}-{suite}" if frame.suite.nunique() > 1 else metric: dots(
                _by_task(frame[frame.suite == suite]), unit
            )
            for suite in frame.suite.unique()
        }
    return {
        f"{metric}-{key}": curves(panels, key, f"average {unit}")
        for key in labels
        if (panels := _along(frame, key))
    }


def _by_task(frame: Any) -> Panels:
    """Return the values of a suite's rows, a panel for each merger."""
    metric, panels = frame.attrs["metric"], dict[str, Any]()
    unit, names = Unit.of(metric).factor, short_names(tasks_of(frame)) | {AVERAGE: AVERAGE}
    for merger in [name for name in frame.merger.unique() if name] or [""]:
        for row in frame[frame.merger.isin([merger, ""])].to_dict("records"):
            values = {
                name: Value(unit * row[f"{metric}.{task}"],
                            _half(row, unit) if task == AVERAGE else 0.0)
                for task, name in names.items()
                if not is_missing(row[f"{metric}.{task}"])
            }  # fmt: skip
            panels.setdefault(merger, {})[_name(row)] = values
    return panels


def _along(frame: Any, key: str) -> Panels:
    """Return averages along a label, at the first values of the other labels."""
    metric, panels = frame.attrs["metric"], dict[str, Any]()
    unit, records = Unit.of(metric).factor, frame.to_dict("records")
    point = points_of(records, frame.attrs["labels"])[0]
    first = {label: value for label, value in point.items() if label != key}
    at_first = [row for row in records if is_at(row, first)]
    positions = sorted({row[key] for row in at_first if not is_missing(row[key])}, key=str)
    if len(positions) < 2 or not all(isinstance(at, int | float) for at in positions):
        return {}
    for merger in frame.merger[frame.merger != ""].unique():
        for row in (row for row in at_first if row["merger"] in ("", merger)):
            value = Value(unit * row[f"{metric}.{AVERAGE}"], _half(row, unit))
            # A row without the label has the same value everywhere.
            xs = sorted(positions) if is_missing(row[key]) else [row[key]]
            if row["row"] != BASE:
                panels.setdefault(merger, {}).setdefault(_name(row), {}).update(
                    dict.fromkeys(xs, value)
                )
    return {m: {n: dict(sorted(v.items())) for n, v in rows.items()} for m, rows in panels.items()}


def _half(row: Mapping[str, Any], unit: float) -> float:
    return 0.0 if is_missing(row["half"]) else unit * row["half"]


def _name(row: Mapping[str, Any]) -> str:
    return MERGED if row["merger"] and row["row"] == row["merger"] else row["row"]


# ---- charts


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
def dots(panels: Panels, label: str) -> "Figure":
    """Draw values with their intervals, a line for each category.

    Args:
        panels: Panel -> row -> category -> value.
        label: Label of the horizontal axis.
    """
    categories = _names(values for rows in panels.values() for values in rows.values())
    styles = marks(_names(panels.values()))
    height = 0.5 + len(categories) * (0.18 + 0.07 * max(map(len, panels.values())))
    figure, grid = _frame(panels, (2.8, height), label)
    for axes, rows in zip(grid, panels.values(), strict=True):
        for number, (row, values) in enumerate(rows.items()):
            shift = 0.7 * ((number + 0.5) / len(rows) - 0.5)
            heights = [categories.index(name) + shift for name in values]
            means, halves = ([part[n] for part in values.values()] for n in (0, 1))
            axes.errorbar(means, heights, xerr=_bars(halves), elinewidth=1.3, linestyle="none",
                          **styles[row])  # fmt: skip
        axes.grid(visible=False, axis="y")
    grid[0].set_yticks(range(len(categories)), categories)
    grid[0].set_ylim(len(categories) - 0.5, -0.5)
    _legend(figure, styles, "none")
    return figure


@_style()
def curves(panels: Panels, xlabel: str, ylabel: str, *, joined: bool = True) -> "Figure":
    """Draw lines with intervals. An axis of positive numbers over a wide range is logarithmic.

    Args:
        panels: Panel -> row -> position (a number, or the name of a block) -> value.
        xlabel: Label of the horizontal axis.
        ylabel: Label of the vertical axis.
        joined: Draw lines between the points of a row.
    """
    styles = marks(_names(panels.values()))
    figure, grid = _frame(panels, (2.8, 2.3), xlabel)
    figure.supylabel(ylabel, fontsize=9)
    line = "-" if joined else "none"
    for axes, rows in zip(grid, panels.values(), strict=True):
        for row, values in rows.items():
            means, halves = ([part[n] for part in values.values()] for n in (0, 1))
            axes.errorbar(list(values), means, yerr=_bars(halves), elinewidth=1.3, linewidth=1.5,
                          linestyle=line, **styles[row])  # fmt: skip
        _scale(axes, _names(rows.values()))
    _legend(figure, styles, line)
    return figure


def _bars(halves: Sequence[float]) -> Sequence[float] | None:
    return halves if any(halves) else None


def _scale(axes: "Axes", positions: Sequence[Any]) -> None:
    if any(isinstance(at, str) for at in positions):
        step = math.ceil(len(positions) / 8)
        axes.set_xticks(range(0, len(positions), step), positions[::step], rotation=60)
    elif min(positions) > 0 and max(positions) >= 10 * min(positions):
        axes.set_xscale("log")
        ticks = sorted(positions)[:: math.ceil(len(positions) / 6)]
        axes.set_xticks(ticks, [f"{at:g}" for at in ticks], minor=False)
        axes.minorticks_off()


def marks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the colour and mark of each row, as keywords of `Axes.plot`.

    A name without a fixed style gets one from its letters, or the next that is free.
    """
    styles: dict[str, dict[str, Any]] = {}
    taken: list[tuple[str, str]] = []
    for name in names:
        start = zlib.crc32(name.encode()) % len(_FREE_LOOKS)
        free = [look for look in _FREE_LOOKS[start:] + _FREE_LOOKS[:start] if look not in taken]
        look = _LOOKS.get(name, (free or _FREE_LOOKS)[0])
        taken.append(look)
        size, edge = (9 if look[1] == "*" else 6), (1.6 if look[1] == "x" else 0.0)
        styles[name] = {"color": look[0], "marker": look[1], "markersize": size,
                        "markeredgewidth": edge}  # fmt: skip
    return styles


def _names(groups: Iterable[Iterable[Any]]) -> list[Any]:
    """Return every name of some groups once, in order of appearance."""
    return list(dict.fromkeys(name for group in groups for name in group))


def _frame(
    panels: Mapping[str, Any], size: tuple[float, float], xlabel: str
) -> "tuple[Figure, list[Axes]]":
    """Create a figure with a panel of a size in inches for each name, three side by side."""
    from matplotlib.figure import Figure

    if not panels:
        raise ReportError("there is nothing to draw")
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(1.3 + size[0] * across, 0.5 + size[1] * down))
    grid = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes, name in zip(grid, panels, strict=False):
        axes.set_title(name)
        axes.set_xlabel(xlabel)
    return figure, grid[: len(panels)]


def _legend(figure: "Figure", styles: Mapping[str, Mapping[str, Any]], linestyle: Any) -> None:
    """Put a legend of rows below the panels and make room for it."""
    from matplotlib.lines import Line2D

    columns = max(1, int(12 * figure.get_figwidth() / (max(map(len, styles)) + 6)))
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


def save_figures(figures: "Mapping[str, Figure]", folder: str | Path, setting: str) -> list[Path]:
    """Write figures as SVG files of their names into a folder, and return the files.

    Raises:
        ReportError: If there is no figure, or a file cannot be written.
    """
    if not figures:
        raise ReportError("there is nothing to draw")
    target = prepare_directory(folder, setting)
    names = {name: re.sub(r"[^-.:+ \w]", "_", name) for name in figures}
    return [
        write_atomic(target / f"{names[name]}.svg", svg(figure), setting)
        for name, figure in figures.items()
    ]
