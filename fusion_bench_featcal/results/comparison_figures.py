"""Figures of a comparison: accuracy of every cell, and what the gain costs in time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.json_files import read_json

from .drawing import (
    GREY,
    INK,
    MERGED,
    legend_below,
    marks,
    panel_marks,
    panels,
    save_figures,
    style,
)
from .long_table import AVERAGE, BASE, EXPERTS
from .report import REPORT_FILE
from .schema import check_comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NONE = "none"
_ACROSS = 6
_WIDTH = 15  # points that an axis may always span below the median
_REACH = 5  # points from the nearest cell at which references are still drawn
_BARS = "bars: 95 % interval of the difference to the merger, over test items; arrows: far outside"
_ALONE = "by themselves"
_MERGER: dict[str, Any] = {"color": MERGED, "linewidth": 0.9, "alpha": 0.7, "zorder": 1}
_REFERENCES: dict[str, dict[str, Any]] = {
    EXPERTS: {"color": INK, "linewidth": 1.1, "zorder": 1},
    BASE: {"color": GREY, "linewidth": 1.1, "linestyle": "--", "zorder": 1},
}

Row = Mapping[str, Any]
"""As in a comparison's `report.json`."""
_Groups = dict[str, dict[str, Row]]  # title of a panel -> label of a line -> its row


def plot_comparison(
    directory: str | Path, out: str | Path | None = None, setting: str = "--out"
) -> list[Path]:
    """Draw a comparison from its `report.json`, into `out` or its own folder; return the files.

    These are `comparison` and, where gains were timed, `cost`.
    """
    path = Path(directory) / REPORT_FILE
    content = read_json(path)
    check_comparison(content, str(path))
    rows, suite = content["rows"], content["suite"]
    figures = {"comparison": comparison_figure(rows, suite)}
    if any(_timed(row) for row in rows):
        figures["cost"] = cost_figure(rows, suite)
    return save_figures(figures, Path(directory), out, setting)


def comparison_figure(rows: Sequence[Row], title: str = "") -> "Figure":
    """Average accuracy of every cell: a panel for each upstream merger, a line for each method.

    A cell's bar is the 95 % interval of its difference to the merger, drawn around its accuracy.
    """
    groups = _panels(rows)
    methods = list(
        dict.fromkeys(line for name in groups if name != _ALONE for line in groups[name])
    )
    most = max(len(methods), *map(len, groups.values()))
    floor, looks = _floor([_percent(row) for row in _all(groups)]), _looks(groups)
    with style():
        size, label = (1.55, 0.8 + 0.23 * most), "accuracy, %"
        figure, grid = panels(list(groups), size, _ACROSS, title, label)
        for place, (axes, name) in enumerate(zip(grid, groups, strict=True)):
            lines = methods if name != _ALONE else list(groups[name])
            heights = {line: -number for number, line in enumerate(lines)}
            for line, row in groups[name].items():
                _draw_accuracy(axes, row, heights[line], looks[name][line], floor)
            first = place % _ACROSS == 0
            axes.set_yticks(list(heights.values()))
            axes.set_yticklabels(lines if first or name == _ALONE else [""] * len(lines))
            if name == _ALONE and not first:
                axes.yaxis.tick_right()
            axes.tick_params(axis="y", length=0)
            axes.set_ylim(0.4 - most, 0.6)
            axes.spines["left"].set_visible(False)
        _draw_references(figure, dict(zip(groups, grid, strict=True)), groups, rows)
    return figure


def cost_figure(rows: Sequence[Row], title: str = "") -> "Figure":
    """Gain over the merger, with its 95 % interval, against the method's own seconds."""
    groups = _panels([row for row in rows if _timed(row)])
    floor, looks = _floor([100 * row["gain"] for row in _all(groups)]), _looks(_panels(rows))
    with style():
        label = "seconds, without evaluation"
        figure, grid = panels(list(groups), (3.0, 2.8), 3, title, label, sharey=True)
        seen: dict[str, Any] = {}
        for axes, (name, group) in zip(grid, groups.items(), strict=True):
            axes.axhline(0, **_MERGER)
            for line, row in group.items():
                seen[line] = _draw_cost(axes, row, looks[name][line], floor)
            axes.set_xscale("log")
            axes.margins(x=0.08)
            _write_seconds(axes)
        figure.supylabel("gain over the merger, points", fontsize=10)
        legend_below(figure, list(seen.values()), list(seen), _BARS, min(3, len(groups)) + 2)
    return figure


def _write_seconds(axes: "Axes") -> None:
    """Ticks of a logarithmic axis as plain numbers, a few even within one decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axes.get_xlim()
    steps = (1,) if high / low > 500 else (1, 2, 5)
    few: Any = MaxNLocator(4) if high / low < 5 else LogLocator(subs=steps)
    axes.xaxis.set_major_locator(few)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _panels(rows: Sequence[Row]) -> _Groups:
    """Rows by upstream merger; mergers without post-merging together, at the end."""
    groups: _Groups = {}
    for row in rows:
        if row["upstream"] is not None and row["name"] not in (BASE, EXPERTS):
            line = _NONE if row["name"] == row["upstream"] else row["name"]
            groups.setdefault(row["upstream"], {})[line] = row
    if not groups:
        raise ReportError("the comparison has no row to draw")
    alone = {name: group[_NONE] for name, group in groups.items() if list(group) == [_NONE]}
    repaired = {name: group for name, group in groups.items() if name not in alone}
    return repaired | ({_ALONE: alone} if alone else {})


def _all(groups: _Groups) -> list[Row]:
    return [row for group in groups.values() for row in group.values()]


def _looks(groups: _Groups) -> dict[str, dict[str, dict[str, Any]]]:
    """Panel -> line -> keywords of `Axes.plot`."""
    merged = {name: group for name, group in groups.items() if name != _ALONE}
    marked = panel_marks({m: [row["name"] for row in g.values()] for m, g in merged.items()})
    alone = {line: marks([line], line)[line] for line in groups.get(_ALONE, ())}
    return {_ALONE: alone} | {
        merger: {line: marked[merger][row["name"]] for line, row in group.items()}
        for merger, group in merged.items()
    }


def _floor(values: Sequence[float]) -> float:
    """Below it a value is far from all others, and an axis that reached it would squeeze them."""
    middle = median(values)
    return middle - max(5 * (max(values) - middle), _WIDTH) - 1


def _draw_accuracy(
    axes: "Axes", row: Row, height: float, look: Mapping[str, Any], floor: float
) -> None:
    value, bar = _percent(row), _bar(row)
    if value < floor:
        text, place = f"\N{LEFTWARDS ARROW} {value:.1f}", axes.get_yaxis_transform()
        axes.text(0.02, height, text, transform=place, va="center", fontsize=8, color=look["color"])
        return
    if bar is not None:
        axes.plot([value + end for end in bar], [height] * 2, color=look["color"], linewidth=1.4)
    _draw_mark(axes, value, height, look)


def _draw_cost(axes: "Axes", row: Row, look: Mapping[str, Any], floor: float) -> Any:
    seconds, gain, bar = row["cost"]["seconds"], 100 * row["gain"], _bar(row)
    if gain < floor:
        text, place = f"\N{DOWNWARDS ARROW} {gain:.0f}", axes.get_xaxis_transform()
        axes.text(seconds, 0.02, text, transform=place, ha="center", fontsize=8,
                  color=look["color"])  # fmt: skip
        return axes.plot([], [], linestyle="none", **look)[0]
    if bar is not None:
        axes.plot([seconds] * 2, [gain + end for end in bar], color=look["color"], linewidth=1.4)
    return _draw_mark(axes, seconds, gain, look)


def _draw_mark(axes: "Axes", x: float, y: float, look: Mapping[str, Any]) -> Any:
    """Smaller than elsewhere: a mark must not cover its bar."""
    smaller = {key: 0.8 * look[key] for key in ("markersize", "markeredgewidth")}
    return axes.plot([x], [y], linestyle="none", **{**look, **smaller})[0]


def _draw_references(
    figure: "Figure", grid: "Mapping[str, Axes]", groups: _Groups, rows: Sequence[Row]
) -> None:
    """Lines of the merger, the experts and the base, and their legend.

    A reference far from all cells would squeeze them: the legend names it instead.
    """
    shown: dict[str, Any] = {}
    for name, group in groups.items():
        if name != _ALONE and _NONE in group:
            shown["the merger"] = grid[name].axvline(_percent(group[_NONE]), **_MERGER)
    values = [_percent(row) for row in _all(groups)]
    values = [value for value in values if value >= _floor(values)]
    reach = max(_REACH, 0.25 * (max(values) - min(values)) + 1)
    for row in rows:
        name, value = row["name"], _percent(row)
        if name not in _REFERENCES or f"{name} ({value:.1f})" in shown:
            continue
        if min(values) - reach <= value <= max(values) + reach:
            lines = [axes.axvline(value, **_REFERENCES[name]) for axes in grid.values()]
            shown[f"{name} ({value:.1f})"] = lines[0]
        else:
            (empty,) = next(iter(grid.values())).plot([], [], **_REFERENCES[name])
            shown[f"{name} ({value:.1f}, outside)"] = empty
    if shown:
        legend_below(figure, list(shown.values()), list(shown), _BARS, 4)


def _percent(row: Row) -> float:
    return 100 * row["accuracy"][AVERAGE]


def _bar(row: Row) -> tuple[float, float] | None:
    """Ends of the gain's interval, in points from the gain."""
    interval = row["gain_interval"]
    if interval is None or row["gain"] is None:
        return None
    return 100 * (interval["low"] - row["gain"]), 100 * (interval["high"] - row["gain"])


def _timed(row: Row) -> bool:
    """True for a post-merging method's row with a gain and seconds."""
    return (
        row["name"] not in (row["upstream"], *_REFERENCES)
        and row["gain"] is not None
        and isinstance(row["cost"].get("seconds"), int | float)
    )
