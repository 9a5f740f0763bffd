"""Numbers that an SVG of `featcal report --figures` shows, read back by the ticks of its axes."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
Points = list[tuple[float, float]]


class Panel(NamedTuple):
    """One axes: words, tick labels, points by the row of the legend, and ends of bars."""

    words: list[str]
    x_labels: list[str]
    y_labels: list[str]
    points: dict[str, Points]
    bars: list[Points]


def panels(svg: str) -> list[Panel]:
    """Read all axes of a figure. Without a legend all points belong to the row ''."""
    root = ElementTree.fromstring(svg)
    names = {}
    for legend in _named(root, "legend"):
        colours = [_colour(use) for use in legend.iter(f"{SVG}use")]
        names |= dict(zip(colours, _words(legend), strict=True))
    groups = [*_named(root, "axes")]
    shared = {axis: _ticks(groups[0], axis) for axis in "xy"}  # later panels may have no labels
    return [_panel(axes, names, shared) for axes in groups]


def _panel(axes: Any, names: dict[str, str], shared: dict[str, Any]) -> Panel:
    ticks = {axis: _ticks(axes, axis) or shared[axis] for axis in "xy"}
    points: dict[str, Points] = {}
    bars = []
    for group in axes:
        kind = group.get("id", "").partition("_")[0]
        if kind == "line2d":
            for use in group.iter(f"{SVG}use"):
                position = (float(use.get("x")), float(use.get("y")))
                points.setdefault(names.get(_colour(use), ""), []).append(_valued(ticks, position))
        if kind == "LineCollection":
            for path in group.iter(f"{SVG}path"):
                ends = re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d"))
                bars.append([_valued(ticks, (float(x), float(y))) for x, y in ends])
    x_labels, y_labels = ([label for label, _ in ticks[axis]] for axis in "xy")
    return Panel(_words(axes), x_labels, y_labels, points, bars)


def _named(root: Any, kind: str) -> Iterator[Any]:
    return (g for g in root.iter(f"{SVG}g") if re.fullmatch(rf"{kind}_\d+", g.get("id", "")))


def _words(element: Any) -> list[str]:
    return [text.text or "" for text in element.iter(f"{SVG}text")]


def _colour(use: Any) -> str:
    return re.search(r"fill: ([^;]+)", use.get("style", "") + "fill: ")[1]  # type: ignore[index]


def _ticks(axes: Any, axis: str) -> list[tuple[str, float]]:
    """Labels of an axis with their positions. Ticks without a mark have the label's."""
    ticks = []
    for tick in _named(axes, f"{axis}tick"):
        marks = [*tick.iter(f"{SVG}use"), *tick.iter(f"{SVG}text")]
        ticks += (
            [(" ".join(_words(tick)), float(marks[0].get(axis, "nan")))] if _words(tick) else []
        )
    return ticks


def _valued(ticks: dict[str, Any], position: tuple[float, float]) -> tuple[float, float]:
    """Values at a position. On an axis of words this is the number of the nearest word."""
    values = []
    for at, labels in zip(position, ticks.values(), strict=True):
        numbers = [label.replace("\u2212", "-") for label, _ in labels]
        if labels and all(re.fullmatch(r"-?[\d.]+", number) for number in numbers):
            low, high, start, end = (
                *map(float, numbers[:: len(numbers) - 1]),
                *(labels[n][1] for n in (0, -1)),
            )
            values.append(round(low + (at - start) / (end - start) * (high - low), 3))
        else:
            gaps = [abs(at - where) for _, where in labels]
            values.append(gaps.index(min(gaps)) if gaps else at)
    return values[0], values[1]
