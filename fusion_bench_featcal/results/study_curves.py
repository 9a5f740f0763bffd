"""Curves of a study along its axes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .drawing import GREY, INK, MERGED, legend_below, marks, panels, style
from .items import half_of
from .long_table import AVERAGE, BASE, EXPERTS
from .study import Study
from .study_page import Row, bars, merged_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXIS_NAMES = {
    "samples_per_task": "samples per task", "tasks": "tasks merged",
    "ridge_lambda": "ridge_lambda (\N{GREEK SMALL LETTER LAMDA})",
    "mix_alpha": "mix_alpha (\N{GREEK SMALL LETTER ALPHA})",
    "anchor_rho": "anchor_rho (\N{GREEK SMALL LETTER RHO})",
}  # fmt: skip
_LABELS_APART = 4  # ratio of neighbours
_SHIFT = 2.5  # points between neighbouring rows' bars


class Curve(NamedTuple):
    """A line: x, y and half of y's interval."""

    x: list[float]
    y: list[float]
    half: list[float]


def centre(study: Study) -> dict[str, Any]:
    """Labels of the present settings: the first point, where each axis varies by itself."""
    return merged_points(study)[0][0]


def curves(study: Study, merger: str, cost: str | None = None) -> dict[str, dict[str, Curve]]:
    """Axis -> row -> curve along the axis, all other labels being those of the first point."""
    points, middle = merged_points(study), centre(study)
    lines: dict[str, dict[str, Curve]] = {}
    for axis in middle:
        along = [
            (labels[axis], rows)
            for labels, rows in points
            if all(labels[key] == middle[key] for key in middle if key != axis)
            and isinstance(labels[axis], int | float)
        ]
        if len(along) < 2:
            continue
        along.sort(key=lambda point: point[0])
        for name in study.names(merger):
            line = [(x, rows[merger, name]) for x, rows in along if (merger, name) in rows]
            line = [(x, row) for x, row in line if cost is None or cost in row["cost"]]
            if line:
                lines.setdefault(axis, {})[name] = _curve(line, cost)
    return lines


def _curve(line: Sequence[tuple[float, Row]], cost: str | None) -> Curve:
    if cost:
        values = [row["cost"][cost] for _, row in line]
        spread = [
            half_of(row.get("spread", {}).get(cost, 0.0), row.get("seeds", 1)) for _, row in line
        ]
        return Curve([x for x, _ in line], values, spread)
    values = [100 * row["accuracy"][AVERAGE] for _, row in line]
    return Curve([x for x, _ in line], values, [100 * row["half_width"] for _, row in line])


def curve_figure(study: Study, merger: str, lines: Mapping[str, Mapping[str, Curve]]) -> "Figure":
    """Accuracy along every axis, a panel each."""
    with style():
        titles = [f"{study.suite}, over {merger}"] * len(lines)
        if len(lines) > 1:
            titles = ["" for _ in titles]
        wide = (3.6 if len(lines) > 1 else 4.4, 3.4)
        heading = f"{study.name}: {study.suite}, over {merger}" if len(lines) > 1 else study.name
        figure, grid = panels(titles, wide, 3, heading, "", sharex=False)
        every = [name for name in study.names(merger) if name not in (BASE, EXPERTS, merger)]
        looks = marks([*every, merger], merger)
        drawn: dict[str, Any] = {}
        for axes, (axis, rows) in zip(grid, lines.items(), strict=False):
            moved = shifts({name: rows[name] for name in every if name in rows})
            for name, shift in moved.items():
                drawn[name] = draw_curve(axes, rows[name], looks[name], shift)
            _levels(axes, rows, merger, drawn)
            label_axis(axes, axis, rows[next(iter(rows))].x)
            if study.design == "each":
                mark = axes.axvline(centre(study)[axis], color=GREY, linestyle=":")
                drawn["the present setting"] = mark
        grid[0].set_ylabel("average accuracy, %", fontsize=9)
        legend_below(figure, list(drawn.values()), list(drawn), bars(study), 4)
    return figure


def draw_curve(axes: "Axes", curve: Curve, look: Mapping[str, Any], shift: float = 0.0) -> Any:
    """Draw a line with its bars, moved to the right by some points; return the line."""
    from matplotlib.transforms import ScaledTranslation

    move = ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
    place: dict[str, Any] = {"transform": axes.transData + move}
    low, high = ([y + sign * half for y, half in zip(curve.y, curve.half, strict=True)]
                 for sign in (-1, 1))  # fmt: skip
    # Limits come from what is drawn in the axes' own units only.
    axes.update_datalim([*zip(curve.x, low, strict=True), *zip(curve.x, high, strict=True)])
    axes.autoscale_view()
    if any(curve.half):
        axes.vlines(curve.x, low, high, color=look["color"], linewidth=1.1, alpha=0.7, **place)
    smaller = {**look, "markersize": 0.75 * look["markersize"]}
    return axes.plot(curve.x, curve.y, linewidth=1.2, **{**smaller, **place})[0]


def shifts(rows: Mapping[str, Curve]) -> dict[str, float]:
    """Shift of each row in points, so that bars at the same value stand side by side."""
    if not any(any(curve.half) for curve in rows.values()):
        return dict.fromkeys(rows, 0.0)
    return {name: _SHIFT * (place - (len(rows) - 1) / 2) for place, name in enumerate(rows)}


def _levels(axes: "Axes", rows: Mapping[str, Curve], merger: str, drawn: dict[str, Any]) -> None:
    """Merger and experts: level lines where they do not change along the axis, else curves."""
    for name, colour in ((merger, MERGED), (EXPERTS, INK)):
        curve = rows.get(name)
        if curve is None:
            continue
        if max(curve.y) - min(curve.y) < 0.05:
            drawn[name] = axes.axhline(curve.y[0], linewidth=1.1, color=colour)
        else:
            drawn[name] = axes.plot(curve.x, curve.y, linewidth=1.1, color=colour)[0]


def label_axis(axes: "Axes", axis: str, values: Sequence[float]) -> None:
    """Name an axis; logarithmic where values are of several magnitudes."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xlabel(AXIS_NAMES.get(axis, axis), fontsize=9)
    positive = [value for value in values if value > 0]
    if positive and max(positive) / min(positive) > 20:
        if len(positive) < len(values):
            axes.set_xscale("symlog", linthresh=min(positive), linscale=0.6)
            axes.set_xlim(-0.2 * min(positive), 1.6 * max(positive))
        else:
            axes.set_xscale("log")
        values = _apart(values)
    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if len(values) > 9:
        axes.tick_params(axis="x", labelrotation=60)


def _apart(values: Sequence[float]) -> list[float]:
    """Values of a logarithmic axis that are far enough apart for their labels."""
    shown: list[float] = []
    for value in sorted(values):
        last = shown[-1] if shown else 0.0
        if last <= 0 or len(values) < 8 or value >= _LABELS_APART * last:
            shown.append(value)
    return shown
