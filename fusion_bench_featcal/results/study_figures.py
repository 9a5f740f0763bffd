"""Figures of a study: curves along its axes, heat maps of pairs, differences, and costs."""

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .data_figures import data_figures
from .drawing import GREY, INK, MERGED, legend_below, marks, panels, save_figures, style
from .long_table import AVERAGE, BASE, EXPERTS
from .study import Study
from .study_page import Row, merged_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PAPER_FILE = Path(__file__).with_name("paper_studies.csv")
AXIS_NAMES = {
    "samples_per_task": "samples per task", "tasks": "tasks merged",
    "ridge_lambda": "ridge_lambda (\N{GREEK SMALL LETTER LAMDA})",
    "mix_alpha": "mix_alpha (\N{GREEK SMALL LETTER ALPHA})",
    "anchor_rho": "anchor_rho (\N{GREEK SMALL LETTER RHO})",
}  # fmt: skip
COSTS = {
    "seconds": ("seconds", 1.0), "peak_rss_bytes": ("memory, MiB", 2.0**20),
    "gpu_energy_wh": ("GPU energy, Wh", 1.0),
}  # fmt: skip
_LABELS_APART = 4  # ratio of neighbours
_BARS = "bars: 95 % interval over seeds"


class Curve(NamedTuple):
    """A line: x, y and half of y's interval."""

    x: list[float]
    y: list[float]
    half: list[float]


def plot_study(
    directory: str | Path, out: str | Path | None = None, setting: str = "--out"
) -> list[Path]:
    """Draw a study from its `study.json`, into `out` or its own folder; return the files.

    Raises:
        ReportError: If the study is damaged, or matplotlib is missing.
    """
    study = Study.load(directory)
    return save_figures(study_figures(study), Path(directory), out, setting)


def study_figures(study: Study) -> "dict[str, Figure]":
    """The figures that fit a study's points, by name."""
    figures: dict[str, Figure] = {}
    for merger, name in figure_names(study).items():
        lines = curves(study, merger)
        own = data_figures(study, merger, name)
        if own is not None:
            figures |= own
        elif len(study.points) == 1:
            figures[name] = difference_figure(study, merger)
        elif study.name == "cost":
            figures[name] = cost_figure(study, merger)
        elif lines:
            figures[name] = curve_figure(study, merger, lines)
        else:
            figures[name] = label_figure(study, merger)
        for one, other in planes(study):
            figures[f"{name}-{one}-{other}"] = plane_figure(study, merger, one, other)
    return figures


def figure_names(study: Study) -> dict[str, str]:
    """Merger -> name of its figure, of mergers with a row to draw."""
    mergers = (m for m in study.mergers if m and set(study.names(m)) - {m, BASE, EXPERTS})
    one = len(study.mergers) == 1
    return {merger: study.name if one else f"{study.name}-{merger}" for merger in mergers}


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
        spread = [row.get("spread", {}).get(cost, 0.0) for _, row in line]
        return Curve([x for x, _ in line], values, spread)
    values = [100 * row["accuracy"][AVERAGE] for _, row in line]
    return Curve([x for x, _ in line], values, [100 * row["half_width"] for _, row in line])


def curve_figure(study: Study, merger: str, lines: Mapping[str, Mapping[str, Curve]]) -> "Figure":
    """Accuracy along every axis, a panel each; beside them the paper's curve where it has one."""
    published = paper_curves(study.name)
    with style():
        titles = [f"{study.suite}, over {merger}"] * len(lines) + ["the paper, ViT-B/32"] * bool(
            published
        )
        if len(lines) > 1:
            titles = ["" for _ in titles]
        wide = (3.6 if len(lines) > 1 else 4.4, 3.4)
        heading = f"{study.name}: {study.suite}, over {merger}" if len(lines) > 1 else study.name
        figure, grid = panels(titles, wide, 3, heading, "", sharex=False)
        every = [name for name in study.names(merger) if name not in (BASE, EXPERTS, merger)]
        looks = marks([*every, merger], merger)
        drawn: dict[str, Any] = {}
        for axes, (axis, rows) in zip(grid, lines.items(), strict=False):
            for name in every:
                if name in rows:
                    drawn[name] = draw_curve(axes, rows[name], looks[name])
            _levels(axes, rows, merger, drawn)
            label_axis(axes, axis, rows[next(iter(rows))].x)
            if study.design == "each":
                mark = axes.axvline(centre(study)[axis], color=GREY, linestyle=":")
                drawn["the present setting"] = mark
        grid[0].set_ylabel("average accuracy, %", fontsize=9)
        if published:
            _draw_published(grid[-1], published, looks, next(iter(lines)))
            own = next(iter(lines.values()))
            _gap_scale(grid[0], own, merger)
        legend_below(figure, list(drawn.values()), list(drawn), interval_note(study), 4)
    return figure


def interval_note(study: Study) -> str:
    """Meaning of a curve's bars."""
    if study.over:
        return f"bars: 95 % interval over {' and '.join(study.over)}"
    return _BARS if len(study.seeds) > 1 else "one seed: no interval"


def draw_curve(axes: "Axes", curve: Curve, look: Mapping[str, Any], **more: Any) -> Any:
    """Draw a line with its bars; return the line."""
    colour = look["color"]
    if any(curve.half):
        axes.errorbar(curve.x, curve.y, yerr=curve.half, fmt="none", ecolor=colour, elinewidth=1.1,
                      alpha=0.7)  # fmt: skip
    smaller = {**look, "markersize": 0.75 * look["markersize"]}
    return axes.plot(curve.x, curve.y, linewidth=1.2, **{**smaller, **more})[0]


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


# ---- the paper's curves


class Published(NamedTuple):
    """Values of the paper along an axis: row -> curve; the merged model's and experts' level."""

    rows: dict[str, Curve]
    merged: float
    experts: float
    source: str


@cache
def paper_curves(study: str) -> Published | None:
    """The paper's curve for a study, which is on another suite; None where it prints none."""
    with _PAPER_FILE.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["study"] == study and line["at"]]
    with _PAPER_FILE.open(encoding="utf-8", newline="") as file:
        levels = {
            line["row"]: float(line["value"])
            for line in csv.DictReader(file)
            if line["study"] == study and not line["at"]
        }
    if not lines:
        return None
    rows: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        rows.setdefault(line["row"], []).append(line)
    drawn = {
        row: Curve(
            [float(line["at"]) for line in each],
            [float(line["value"]) for line in each],
            [float(line["deviation"]) for line in each],
        )
        for row, each in rows.items()
    }
    return Published(drawn, levels["merged"], levels[EXPERTS], lines[0]["source"])


def _draw_published(
    axes: "Axes", published: Published, looks: Mapping[str, Any], axis: str
) -> None:
    """Draw the paper's curves, dashed."""
    for row, curve in published.rows.items():
        look = looks.get(row) or marks([row], None)[row]
        draw_curve(axes, curve, look, linestyle="--")
    axes.axhline(published.merged, linewidth=1.1, color=MERGED, linestyle="--")
    axes.axhline(published.experts, linewidth=1.1, color=INK, linestyle="--")
    label_axis(axes, axis, next(iter(published.rows.values())).x)
    axes.set_title(f"the paper (dashed), {published.source}", fontsize=10)
    _second_scale(axes, published.merged, published.experts)


def _gap_scale(axes: "Axes", rows: Mapping[str, Curve], merger: str) -> None:
    if merger in rows and EXPERTS in rows:
        _second_scale(axes, rows[merger].y[0], rows[EXPERTS].y[0])


def _second_scale(axes: "Axes", merged: float, experts: float) -> None:
    """Scale on the right: share of the gap from merged model to experts, alike in all suites."""
    gap = experts - merged
    if gap <= 0:
        return
    to_share: Any = lambda y: 100 * (y - merged) / gap  # noqa: E731
    from_share: Any = lambda share: merged + share * gap / 100  # noqa: E731
    right = axes.secondary_yaxis("right", functions=(to_share, from_share))
    right.set_ylabel("gap recovered, %", fontsize=8)
    right.tick_params(labelsize=8)


# ---- heat maps, differences, costs


def planes(study: Study) -> list[tuple[str, str]]:
    """Pairs of axes along which the points make a plane."""
    if study.design != "each":
        return []
    middle = centre(study)
    pairs: dict[tuple[str, str], None] = {}
    for labels, _ in merged_points(study):
        moved = tuple(key for key in middle if labels[key] != middle[key])
        if len(moved) == 2:
            pairs[moved[0], moved[1]] = None
    return list(pairs)


def plane_figure(study: Study, merger: str, one: str, other: str) -> "Figure":
    """Accuracy of FeatCal over two settings; the present ones have a frame."""
    middle = centre(study)
    values = {}
    name = next(n for n in study.names(merger) if n not in (merger, BASE, EXPERTS))
    for labels, rows in merged_points(study):
        if all(labels[key] == middle[key] for key in middle if key not in (one, other)):
            row = rows.get((merger, name))
            if row is not None:
                values[labels[one], labels[other]] = 100 * row["accuracy"][AVERAGE]
    ones, others = (sorted({pair[place] for pair in values}) for place in (0, 1))
    table = [[values.get((x, y), float("nan")) for x in ones] for y in others]
    with style():
        size = (1.2 + 0.62 * len(ones), 0.6 + 0.42 * len(others))
        title = f"{study.suite}, over {merger}: {name}, average accuracy, %; bold: present settings"
        figure, (axes,) = panels([""], size, 1, title, AXIS_NAMES.get(one, one))
        axes.grid(False)
        image = axes.imshow(table, cmap="cividis", aspect="auto", origin="lower")
        axes.set_xticks(range(len(ones)), [f"{value:g}" for value in ones])
        axes.set_yticks(range(len(others)), [f"{value:g}" for value in others])
        axes.set_ylabel(AXIS_NAMES.get(other, other), fontsize=9)
        known = [value for value in values.values()]
        dark = (max(known) + min(known)) / 2
        for (x, y), value in values.items():
            is_present = x == middle[one] and y == middle[other]
            axes.text(ones.index(x), others.index(y), f"{value:.1f}", ha="center", va="center",
                      fontsize=8, color="white" if value < dark else "black",
                      weight="bold" if is_present else "normal")  # fmt: skip
        figure.colorbar(image, ax=axes)
    return figure


def difference_figure(study: Study, merger: str) -> "Figure":
    """Difference of every row from the row it is compared with, with intervals; a panel each."""
    (_, rows), *_ = merged_points(study)
    panels_of: dict[str, dict[str, Row]] = {}
    for (upstream, name), row in rows.items():
        other = row.get("against")
        if upstream == merger and row["difference"] and other != name and name not in (
            BASE, EXPERTS,
        ):  # fmt: skip
            panels_of.setdefault(str(other), {})[name] = row
    panels_of = {o: r for o, r in panels_of.items() if o != merger} or panels_of
    most = max(map(len, panels_of.values()))
    with style():
        titles = [f"from {other}" for other in panels_of]
        heading = f"{study.name}: {study.suite}, over {merger}"
        label = "difference of average accuracy, points"
        figure, grid = panels(titles, (4.6, 0.9 + 0.27 * most), 2, heading, label, sharex=False)
        for axes, (_, group) in zip(grid, panels_of.items(), strict=True):
            for place, row in enumerate(group.values()):
                ends = [100 * row["difference"][key] for key in ("low", "high")]
                value = 100 * row["difference"]["estimate"]
                axes.plot(ends, [-place] * 2, color=INK, linewidth=1.3)
                axes.plot([value], [-place], "o", color=INK, markersize=6)
            axes.axvline(0, color=GREY, linewidth=1)
            axes.set_yticks([-place for place in range(len(group))], list(group), fontsize=9)
            axes.set_ylim(0.6 - most, 0.6)
    return figure


def label_figure(study: Study, merger: str) -> "Figure":
    """Accuracy at points with names: a line for each point and row."""
    points = merged_points(study)
    names = [n for n in study.names(merger) if n not in (BASE, EXPERTS, merger)]
    looks = marks([*names, merger], merger)
    with style():
        size = (5.0, 0.9 + 0.33 * len(points))
        heading = f"{study.name}: {study.suite}, over {merger}"
        figure, (axes,) = panels([""], size, 1, heading, "average accuracy, %")
        drawn: dict[str, Any] = {}
        for place, (_, rows) in enumerate(points):
            for name in (merger, *names):
                row = rows.get((merger, name))
                if row is not None:
                    value, half = 100 * row["accuracy"][AVERAGE], 100 * row["half_width"]
                    axes.plot([value - half, value + half], [-place] * 2,
                              color=looks[name]["color"], linewidth=1.2)  # fmt: skip
                    drawn[name] = axes.plot([value], [-place], linestyle="none", **looks[name])[0]
        heads = [", ".join(str(value) for value in labels.values()) for labels, _ in points]
        axes.set_yticks([-place for place in range(len(points))], heads, fontsize=9)
        legend_below(figure, list(drawn.values()), list(drawn), interval_note(study), 4)
    return figure


def cost_figure(study: Study, merger: str) -> "Figure":
    """Seconds, memory and, where there is a GPU, its energy, along the first axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    measured = {key: curves(study, merger, key) for key in COSTS}
    measured = {key: next(iter(lines.values())) for key, lines in measured.items() if lines}
    axis = next(iter(centre(study)))
    names = [n for n in study.names(merger) if n not in (BASE, EXPERTS, merger)]
    looks = marks([*names, merger], merger)
    with style():
        titles = [f"{COSTS[key][0]}" for key in measured]
        heading = f"{study.name}: {study.suite}, over {merger}"
        figure, grid = panels(titles, (4.0, 3.2), 3, heading, "", sharex=False)
        drawn: dict[str, Any] = {}
        for axes, (key, rows) in zip(grid, measured.items(), strict=True):
            unit = COSTS[key][1]
            for name in names:
                if name in rows:
                    curve = Curve(rows[name].x, [y / unit for y in rows[name].y],
                                  [half / unit for half in rows[name].half])  # fmt: skip
                    drawn[name] = draw_curve(axes, curve, looks[name])
            label_axis(axes, axis, next(iter(rows.values())).x)
            if key == "seconds":
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.yaxis.set_minor_formatter(NullFormatter())
        title = "bars: standard deviation over seeds" if len(study.seeds) > 1 else ""
        legend_below(figure, list(drawn.values()), list(drawn), title, 4)
    return figure
