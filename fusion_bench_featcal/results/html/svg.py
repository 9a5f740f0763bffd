"""Panels of figures as inline SVG.

Horizontal places are percentages of a panel's width and vertical ones are pixels: a panel fits any
screen while its text keeps its size.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from fusion_bench_featcal.results.drawing import INK

_RIGHT = 96.0
_TOP, _BOTTOM = 22, 36
_LETTER = 6.6  # pixels of a letter, about
_LINE = 12  # pixels from line to line of a label
_NARROWEST = 200  # pixels between the ends of a horizontal axis on a phone
_STEPS = (1, 2, 5)
_ROOM = 1.25  # factor beyond the ends of a logarithmic axis
_MAGNITUDES = 20  # ratio of values from which on an axis is logarithmic


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high`, and the texts at some of them."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    label: str = ""
    log: bool = False

    def share(self, value: float) -> float:
        """Place of a value: 0 at the low end, 1 at the high one."""
        if self.log:
            value = max(value, self.low * _ROOM)  # zero has no place of its own
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @classmethod
    def linear(cls, values: Iterable[float], label: str = "", *, zero: bool = False) -> "Axis":
        """Span finite values, and 0 if it must be seen."""
        numbers = [*values, *([0.0] if zero else [])]
        low, high = min(numbers), max(numbers)
        pad = 0.06 * (high - low) or max(abs(high), 1e-3) * 0.1
        low, high = low - pad * (low != 0 or not zero), high + pad
        return cls(low, high, _round_ticks(low, high), label)

    @classmethod
    def logarithmic(cls, values: Iterable[float], label: str = "") -> "Axis":
        """Span positive values."""
        numbers = list(values)
        low, high = min(numbers) / _ROOM, max(numbers) * _ROOM
        if high / low < 10:
            # `share` has one place for all values below the least.
            return cls(low, high, _round_ticks(min(numbers), high), label, log=True)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = _STEPS if high / low < 200 else (1,)
        every = [step * 10.0**power for power in powers for step in steps]
        ticks = [(value, f"{value:g}") for value in every if min(numbers) <= value <= high]
        return cls(low, high, ticks, label, log=True)

    @classmethod
    def settings(cls, values: Iterable[float], label: str = "") -> "Axis":
        """Span a setting's values and name those with room; logarithmic where they differ much.

        On a logarithmic axis zero stands a magnitude below the least positive value.
        """
        numbers = sorted(set(values))
        positive = [value for value in numbers if value > 0]
        if numbers[0] >= 0 and positive and positive[-1] > _MAGNITUDES * positive[0]:
            axis = cls.logarithmic([*([positive[0] / 10] * (numbers[0] == 0)), *positive], label)
        else:
            axis = cls.linear(numbers, label)
        ticks: list[tuple[float, str]] = []
        end = -math.inf  # pixel at which the last text ends
        for value in numbers:
            text, place = f"{value:g}", _NARROWEST * axis.share(value)
            half = _LETTER * len(text) / 2
            if place - half > end:
                ticks.append((value, text))
                end = place + half + 4
        return replace(axis, ticks=ticks)

    @classmethod
    def names(cls, names: Sequence[str], label: str = "") -> "Axis":
        """Places 0, 1, 2, ... from left to right, of which as many are named as there is room."""
        longest = max(map(len, names))
        room = max(1, int(_NARROWEST // (_LETTER * longest + 8)))
        every = -(-len(names) // room)
        ticks = [(float(n), name) for n, name in enumerate(names) if n % every == 0]
        return cls(-0.3, len(names) - 0.7, ticks, label)

    @classmethod
    def lines(cls, heights: Mapping[str, float]) -> "Axis":
        """Named lines, the first at the top: heights grow downwards."""
        ends = min(heights.values()), max(heights.values())
        return cls(ends[1] + 0.6, ends[0] - 0.6, [(h, name) for name, h in heights.items()])


def _round_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """At most six round numbers between two values, at equal distances."""
    step = next(
        step * 10.0**power
        for power in range(math.floor(math.log10(high - low)) - 1, 99)
        for step in _STEPS
        if (high - low) / (step * 10.0**power) <= 5
    )
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(number * step, f"{number * step:.6g}") for number in numbers]


@dataclass(frozen=True)
class Point:
    """One mark; `bar` are the ends of its interval along the panel's value axis."""

    x: float
    y: float
    tip: str  # shown to a pointer
    bar: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """Marks of one look (of `drawing.marks`)."""

    name: str
    look: Mapping[str, Any]
    points: Sequence[Point]
    joined: bool = False


@dataclass(frozen=True)
class Panel:
    """One set of axes and what is drawn in it."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    description: str  # what a reader who does not see it is attributes
    height: int = 240  # pixels
    left: float = 13.0  # per cent of the width before the axes
    upright: bool = True  # bars are along y, else along x
    spans: Sequence[tuple[float, float, float]] = ()  # broad grey lines: height, from x, to x


def _polygon(corners: int, radius: float, turn: float = 0.0, inner: float | None = None) -> str:
    """Path of a regular polygon with a corner at the top, or of a star."""
    count = corners * (1 if inner is None else 2)
    points = []
    for n in range(count):
        size = radius if inner is None or n % 2 == 0 else inner
        angle = 2 * math.pi * n / count + math.radians(turn)
        points.append(f"{size * math.sin(angle):.2f},{-size * math.cos(angle):.2f}")
    return f"M{'L'.join(points)}z"


_CROSS = "M-1.8,-5.5h3.6v3.7h3.7v3.6h-3.7v3.7h-3.6v-3.7h-3.7v-3.6h3.7z"
_SHAPES = {
    "o": "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0z",
    "s": _polygon(4, 5.8, 45),
    "D": _polygon(4, 5.8),
    "d": "M0,-6L3.6,0L0,6L-3.6,0z",
    "^": _polygon(3, 6),
    "v": _polygon(3, 6, 180),
    "<": _polygon(3, 6, -90),
    ">": _polygon(3, 6, 90),
    "h": _polygon(6, 5.4),
    "p": _polygon(5, 5.4),
    "*": _polygon(5, 7.2, inner=2.9),
    "P": _CROSS,
    "X": "M-5.1,-2.6L-2.6,-5.1L0,-2.5L2.6,-5.1L5.1,-2.6L2.5,0L5.1,2.6L2.6,5.1L0,2.5L-2.6,5.1"
    "L-5.1,2.6L-2.5,0z",
    "x": "M-4.5,-4.5L4.5,4.5M-4.5,4.5L4.5,-4.5",
    "|": "M0,-8V8",
}  # fmt: skip
_NUMBERS = {shape: number for number, shape in enumerate(_SHAPES)}
_OPEN = ("x", "|")


def shapes() -> Markup:
    """Definitions of all marks; the page has them once."""
    paths = (
        Markup('<path id="mark{}" d="{}"/>').format(number, path)
        for number, path in enumerate(_SHAPES.values())
    )
    return Markup('<svg width="0" height="0" aria-hidden="true"><defs>{}</defs></svg>').format(
        Markup("").join(paths)
    )


def _colour(colour: str) -> str:
    """Ink is the colour of text, which a dark page changes."""
    return "currentColor" if colour == INK else colour


def mark(look: Mapping[str, Any], x: str, y: str, tip: str = "") -> Markup:
    """One mark of a look of `drawing.marks`."""
    shape = look["marker"] if look["marker"] in _SHAPES else "o"
    colour = _colour(look["color"])
    hollow = shape in _OPEN or look.get("markerfacecolor") == "white"
    paint = "none" if shape in _OPEN else "var(--page)" if hollow else colour
    edge = Markup(' stroke="{}" stroke-width="2"').format(colour) if hollow else Markup("")
    attributes = Markup(' class="pt" data-tip="{}"').format(tip) if tip else Markup("")
    return Markup('<use href="#mark{}" x="{}" y="{}" fill="{}"{}{}/>').format(
        _NUMBERS[shape], x, y, paint, edge, attributes
    )


def draw(panel: Panel) -> Markup:
    """Return the panel as an `svg` element."""

    def across(value: float) -> str:
        return f"{panel.left + panel.x.share(value) * (_RIGHT - panel.left):.2f}%"

    def down(value: float) -> str:
        room = panel.height - _TOP - _BOTTOM
        return f"{_TOP + (1 - panel.y.share(value)) * room:.1f}"

    parts = [*_axes(panel, across, down)]
    for height, start, end in panel.spans:
        parts.append(_line("span", across(start), down(height), across(end), down(height)))
    for series in panel.series:
        drawn = [*_strokes(panel, series, across, down)]
        drawn += [mark(series.look, across(p.x), down(p.y), p.tip) for p in series.points]
        style = Markup('<g class="series" data-series="{}" stroke="{}">{}</g>')
        colour = _colour(series.look["color"])
        parts.append(style.format(series.name, colour, Markup("").join(drawn)))
    return Markup(
        '<svg class="plot" role="img" tabindex="0" height="{}" aria-label="{}">{}</svg>'
    ).format(panel.height, panel.description, Markup("").join(parts))


def _line(kind: str, x1: str, y1: str, x2: str, y2: str) -> Markup:
    return Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(kind, x1, y1, x2, y2)


def _strokes(panel: Panel, series: Series, across: Any, down: Any) -> Iterable[Markup]:
    """Lines between a series' points, and the bars of their intervals."""
    if series.joined:
        for one, two in zip(series.points, series.points[1:], strict=False):
            yield _line("join", across(one.x), down(one.y), across(two.x), down(two.y))
    for point in series.points:
        if point.bar is None:
            continue
        (x1, y1), (x2, y2) = (
            (across(point.x), down(end)) if panel.upright else (across(end), down(point.y))
            for end in point.bar
        )
        yield _line("bar", x1, y1, x2, y2)


def _in_lines(label: str, room: int) -> list[str]:
    """A label in one line or two of `room` letters, broken behind an underscore or the like."""
    if len(label) <= room:
        return [label]
    ends = [place for place in range(1, room + 1) if label[place - 1] in "_-./ "]
    end = max(ends, default=room)
    first, rest = label[:end], label[end:]
    return [first, rest if len(rest) <= room else f"{rest[: room - 1]}…"]


def _axes(panel: Panel, across: Any, down: Any) -> Iterable[Markup]:
    text = Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>')
    base, left = panel.height - _BOTTOM, f"{panel.left}%"
    for value, label in panel.y.ticks:
        yield _line("grid", left, down(value), f"{_RIGHT}%", down(value))
        shown = _in_lines(label, int(panel.left * 3.4 / _LETTER))
        for number, line in enumerate(shown):
            height = f"{float(down(value)) + 4 + _LINE * (number - (len(shown) - 1) / 2):.1f}"
            yield text.format(f"{panel.left - 1.5}%", height, "end", line)
    for value, label in panel.x.ticks:
        yield _line("grid", across(value), f"{_TOP}", across(value), f"{base}")
        yield text.format(across(value), f"{base + 15}", "middle", label)
    yield _line("axis", left, f"{base}", f"{_RIGHT}%", f"{base}")
    yield text.format(f"{_RIGHT}%", f"{base + 31}", "end", panel.x.label)
    if panel.y.label:
        yield text.format("0", "12", "start", panel.y.label)
