"""Figures of studies that change calibration data: `corruption` and `transfer`."""

import re
from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import TYPE_CHECKING, Any

from .data_tables import (
    CLEAN,
    CORRUPTION,
    SEVERITY,
    TRANSFER,
    Points,
    Rows,
    by_corruption,
    corrected,
    gains,
    kind_of,
    parts,
    shown,
    tasks_of,
)
from .drawing import INK, MERGED, legend_below, marks, panels, style
from .long_table import AVERAGE, EXPERTS
from .study import Study, label_text
from .study_page import bars, merged_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACCURACY = "average accuracy on clean images, %"


def data_figures(study: Study, merger: str, name: str) -> "dict[str, Figure] | None":
    """Figures of a study that changes calibration data, by name; None for other studies.

    Each value of the points' other labels has a figure; without a panel there is none.
    """
    makers = {CORRUPTION: _kinds_figure, SEVERITY: _severity_figure, TRANSFER: _transfer_figure}
    kind = kind_of(study)
    if kind is None:
        return None
    figures: dict[str, Figure] = {}
    for others, part in parts(study, merged_points(study)):
        heading = f"over {merger}" + (f" ({label_text(others)})" if others else "")
        figure = makers[kind](study, merger, part, heading)
        if figure is not None:
            places = (f"{key}-{value}" for key, value in others.items())
            figures[re.sub(r"[^\w.+-]", "_", "-".join([name, *places]))] = figure
    return figures


def _kinds_figure(study: Study, merger: str, points: Points, heading: str) -> "Figure":
    """Accuracy by corruption at one severity."""
    every, names = by_corruption(points), corrected(study, merger)
    severity, looks = max(shown(s)[0] for s in every.values()), marks(names, merger)
    with style():
        titles = [f"{study.suite}, severity {severity}"]
        heading = f"calibration on corrupted images, {heading}"
        figure, (axes,) = panels(titles, (4.2, 3.4), 1, heading, "", sharex=False)
        drawn: dict[str, Any] = {}
        for place, name in enumerate(names):
            shift = 0.07 * (place - (len(names) - 1) / 2)  # so that bars do not hide one another
            rows = [shown(severities)[1].get((merger, name)) for severities in every.values()]
            x = [number + shift for number in range(len(every))]
            drawn[name] = _line(axes, x, rows, {**looks[name], "linestyle": "none"})
        drawn |= _levels(axes, every[CLEAN][0], merger)
        axes.set_xticks(range(len(every)), [kind.replace("_", "\n") for kind in every])
        axes.set_ylabel(_ACCURACY, fontsize=9)
        legend_below(figure, list(drawn.values()), list(drawn), bars(study), 4)
    return figure


def _severity_figure(study: Study, merger: str, points: Points, heading: str) -> "Figure | None":
    """Accuracy by severity, a panel for each corruption; None with clean images alone."""
    every, names = by_corruption(points), corrected(study, merger)
    clean, looks = every.pop(CLEAN), marks(names, merger)
    if not every:
        return None
    with style():
        titles = [kind.replace("_", " ") for kind in every]
        heading = f"calibration on corrupted images: {study.suite}, {heading}"
        label = "severity (0: clean)"
        figure, grid = panels(titles, (3.0, 3.0), 3, heading, label, sharey=True)
        drawn: dict[str, Any] = {}
        for axes, severities in zip(grid, every.values(), strict=True):
            along = dict(sorted({**clean, **severities}.items()))
            for name in names:
                rows = [rows.get((merger, name)) for rows in along.values()]
                drawn[name] = _line(axes, list(along), rows, looks[name])
            drawn |= _levels(axes, clean[0], merger)
            axes.set_xticks(list(along))
        grid[0].set_ylabel(_ACCURACY, fontsize=9)
        legend_below(figure, list(drawn.values()), list(drawn), bars(study), 4)
    return figure


def _line(axes: "Axes", x: Sequence[float], rows: Sequence[Any], look: Mapping[str, Any]) -> Any:
    """Draw a row along points, with its bars; points that lack it are left out."""
    held = [(at, row) for at, row in zip(x, rows, strict=True) if row is not None]
    places = [at for at, _ in held]
    heights = [100 * row["accuracy"][AVERAGE] for _, row in held]
    bars = [100 * row["half_width"] for _, row in held]
    axes.errorbar(places, heights, yerr=bars, fmt="none", ecolor=look["color"], elinewidth=1.1)
    return axes.plot(places, heights, **{"linewidth": 1.2, **look})[0]


def _levels(axes: "Axes", rows: Rows, merger: str) -> dict[str, Any]:
    """Lines of the merged model and the experts, which use no calibration images."""
    colours = {name: c for name, c in ((merger, MERGED), (EXPERTS, INK)) if (merger, name) in rows}
    return {
        name: axes.axhline(
            100 * rows[merger, name]["accuracy"][AVERAGE], linewidth=1.1, color=colour
        )
        for name, colour in colours.items()
    }


def _transfer_figure(study: Study, merger: str, points: Points, heading: str) -> "Figure | None":
    """Gain over the merged model by source and task, a panel for each row; None without gains."""
    tables = {name: gains(points, merger, name) for name in corrected(study, merger)}
    tables = {name: table for name, table in tables.items() if table}
    if not tables:
        return None
    sources = list(dict.fromkeys(source for table in tables.values() for source in table))
    lines = [line for table in tables.values() for line in table.values()]
    tasks = tasks_of(lines)
    most = max(abs(value) for line in lines for value in line.values())
    with style():
        size = (1.2 + 0.56 * len(tasks), 0.9 + 0.34 * len(sources))
        heading = f"{study.suite}: gain {heading}, points, by what all tasks are calibrated on"
        figure, grid = panels([f"+ {name}" for name in tables], size, 2, heading, "evaluated on")
        image: Any = None
        for axes, table in zip(grid, tables.values(), strict=True):
            values = [[table.get(source, {}).get(t, nan) for t in tasks] for source in sources]
            image = axes.imshow(values, cmap="PuOr", vmin=-most, vmax=most, aspect="auto")
            axes.grid(False)
            axes.set_xticks(range(len(tasks)), tasks, rotation=40, ha="right", fontsize=8)
            axes.set_yticks(range(len(sources)), sources, fontsize=8)
            _write_values(axes, values, sources, tasks, most)
        figure.colorbar(image, ax=grid)
    return figure


def _write_values(
    axes: "Axes", values: Sequence[Sequence[float]], sources: Sequence[str],
    tasks: Sequence[str], most: float,
) -> None:  # fmt: skip
    """Write numbers on a heat map; a task's own data are bold."""
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if isnan(value):
                continue
            weight = "bold" if sources[y] in (tasks[x], "own") else "normal"
            colour = "white" if abs(value) > 0.6 * most else "black"
            axes.text(x, y, f"{value:+z.1f}", ha="center", va="center", fontsize=7, color=colour,
                      weight=weight)  # fmt: skip
