"""Figures of a study: curves along its axes, heat maps of pairs, differences, and costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.json_files import digest_json, plain

from .data_figures import data_figures
from .drawing import GREY, INK, legend_below, marks, panels, save_figures, style
from .items import LEVEL
from .long_table import AVERAGE, BASE, EXPERTS
from .study import Study
from .study_curves import AXIS_NAMES, Curve, centre, curve_figure, curves, draw_curve, label_axis
from .study_page import COSTS, Row, bars, merged_points

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_study(
    directory: str | Path, out: str | Path | None = None, setting: str = "--out"
) -> list[Path]:
    """Draw a study from its `study.json`, into `out` or its own folder; return the files.

    Raises:
        ReportError: If the study is damaged, or matplotlib is missing.
    """
    return draw_study(Study.load(directory), Path(directory), setting, out)


def draw_study(
    study: Study, folder: Path, setting: str, out: str | Path | None = None
) -> list[Path]:
    """Draw a study's figures into `out` (chosen by `setting`), or else into `folder`."""
    return save_figures(study_figures(study), folder, out, setting, source_of(study))


def source_of(study: Study) -> str:
    """Digest of all that a study's figures show, which they name as their source."""
    shown = (study.name, study.suite, study.points, study.seeds, study.over, study.design)
    return f"study {digest_json(plain(shown, 'study'))}"


def study_figures(study: Study) -> "dict[str, Figure]":
    """The figures that fit a study's points, by name; none where all their cells are absent."""
    figures: dict[str, Figure | None] = {}
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
    return {name: figure for name, figure in figures.items() if figure is not None}


def figure_names(study: Study) -> dict[str, str]:
    """Merger -> name of its figure, of mergers with a row to draw."""
    mergers = (m for m in study.mergers if m and set(study.names(m)) - {m, BASE, EXPERTS})
    one = len(study.mergers) == 1
    return {merger: study.name if one else f"{study.name}-{merger}" for merger in mergers}


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


def plane_figure(study: Study, merger: str, one: str, other: str) -> "Figure | None":
    """Accuracy of FeatCal over two settings, the present ones bold; None without a value."""
    middle = centre(study)
    values = {}
    name = next(n for n in study.names(merger) if n not in (merger, BASE, EXPERTS))
    for labels, rows in merged_points(study):
        if all(labels[key] == middle[key] for key in middle if key not in (one, other)):
            row = rows.get((merger, name))
            if row is not None:
                values[labels[one], labels[other]] = 100 * row["accuracy"][AVERAGE]
    if not values:
        return None
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


def difference_figure(study: Study, merger: str) -> "Figure | None":
    """Difference of every row from the row it is compared with, with intervals; a panel each.

    None where no row has a difference.
    """
    (_, rows), *_ = merged_points(study)
    panels_of: dict[str, dict[str, Row]] = {}
    for (upstream, name), row in rows.items():
        other = row.get("against")
        if upstream == merger and row["difference"] and other != name and name not in (
            BASE, EXPERTS,
        ):  # fmt: skip
            panels_of.setdefault(str(other), {})[name] = row
    panels_of = {o: r for o, r in panels_of.items() if o != merger} or panels_of
    if not panels_of:
        return None
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
        legend_below(figure, list(drawn.values()), list(drawn), bars(study), 4)
    return figure


def cost_figure(study: Study, merger: str) -> "Figure | None":
    """Seconds, memory and, where there is a GPU, its energy, along the first axis of numbers.

    None without such an axis or costs.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    measured = {key: curves(study, merger, key) for key in COSTS}
    axis = next((axis for lines in measured.values() for axis in lines), None)
    if axis is None:
        return None
    along = {key: lines[axis] for key, lines in measured.items() if axis in lines}
    names = [n for n in study.names(merger) if n not in (BASE, EXPERTS, merger)]
    looks = marks([*names, merger], merger)
    with style():
        titles = [f"{COSTS[key][0]}" for key in along]
        heading = f"{study.name}: {study.suite}, over {merger}"
        figure, grid = panels(titles, (4.0, 3.2), 3, heading, "", sharex=False)
        drawn: dict[str, Any] = {}
        for axes, (key, rows) in zip(grid, along.items(), strict=True):
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
        title = f"bars: {100 * LEVEL:.0f} % interval over seeds" if len(study.seeds) > 1 else ""
        legend_below(figure, list(drawn.values()), list(drawn), title, 4)
    return figure
