"""Numbers that an SVG of `featcal report --figures` shows, read back by the ticks of its axes."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
Points = list[tuple[float, float]]
Ticks = list[tuple[str, float]]  # labels with their positions


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
    first = [_ticks(groups[0], axis) for axis in "xy"]  # later panels may have no labels
    return [_panel(axes, names, first) for axes in groups]


def _panel(axes: Any, names: dict[str, str], first: list[Ticks]) -> Panel:
    x_ticks, y_ticks = (
        _ticks(axes, axis) or ticks for axis, ticks in zip("xy", first, strict=True)
    )
    points: dict[str, Points] = {}
    bars: list[Points] = []

    def valued(x: str, y: str) -> tuple[float, float]:
        return _value(x_ticks, float(x)), _value(y_ticks, float(y))

    for group in axes:
        kind = group.get("id", "").partition("_")[0]
        for use in group.iter(f"{SVG}use") if kind == "line2d" else ():
            point = valued(use.get("x"), use.get("y"))
            points.setdefault(names.get(_colour(use), ""), []).append(point)
        for path in group.iter(f"{SVG}path") if kind == "LineCollection" else ():
            ends = re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d"))
            bars.append([valued(*end) for end in ends])
    x_labels, y_labels = ([label for label, _ in ticks] for ticks in (x_ticks, y_ticks))
    return Panel(_words(axes), x_labels, y_labels, points, bars)


def _named(root: Any, kind: str) -> Iterator[Any]:
    return (g for g in root.iter(f"{SVG}g") if re.fullmatch(rf"{kind}_\d+", g.get("id", "")))


def _words(element: Any) -> list[str]:
    return [text.text or "" for text in element.iter(f"{SVG}text")]


def _colour(use: Any) -> str:
    return re.search(r"fill: ([^;]+)", use.get("style", "") + "fill: ")[1]  # type: ignore[index]


def _ticks(axes: Any, axis: str) -> Ticks:
    """Labels of an axis. Ticks without a mark are where their label is."""
    labelled = [tick for tick in _named(axes, f"{axis}tick") if _words(tick)]
    marks = [next(iter([*t.iter(f"{SVG}use"), *t.iter(f"{SVG}text")])) for t in labelled]
    return [
        (" ".join(_words(t)), float(m.get(axis, "nan")))
        for t, m in zip(labelled, marks, strict=True)
    ]


def _value(ticks: Ticks, position: float) -> float:
    """Value at a position. On an axis of words this is the number of the nearest word."""
    labels = [label.replace("\u2212", "-") for label, _ in ticks]
    if labels and all(re.fullmatch(r"-?[\d.]+", label) for label in labels):
        (low, start), (high, end) = ((float(labels[n]), ticks[n][1]) for n in (0, -1))
        return round(low + (position - start) / (end - start) * (high - low), 3)
    gaps = [abs(position - at) for _, at in ticks]
    return gaps.index(min(gaps)) if gaps else position
