"""Figures of final features and weights of a diagnosis, and what its figures share."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .class_gains import LEAST_ITEMS, by_cosine, class_gains, correlated
from .diagnosis import POSITIONS, Diagnosis, gains_of
from .drawing import (
    GREY,
    INK,
    PALETTE,
    RULE,
    legend_below,
    marks,
    new_figure,
    panels,
)
from .tables import short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3
"""Panels side by side."""
_LETTERS = 12  # an inch of a legend
_TASKS = "osD^vPX"


def titled(diagnosis: Diagnosis, text: str) -> str:
    """Put the suite before a heading."""
    return f"{diagnosis.suite}: {text}"


def span(counts: Collection[int]) -> str:
    """The least and the largest of some counts, once where they are equal."""
    return "-".join(map(str, sorted({min(counts), max(counts)})))


def with_items(diagnosis: Diagnosis, text: str) -> str:
    """Put the suite before a heading, and below it the items."""
    items = span(diagnosis.items.values())
    return f"{titled(diagnosis, text)}\n({items} {diagnosis.split} items of each task)"


def with_positions(diagnosis: Diagnosis, text: str) -> str:
    """Put the suite before a heading on drift, and below it items and positions."""
    return f"{with_items(diagnosis, text)[:-1]}, {POSITIONS[diagnosis.positions]})"


def looks_of(diagnosis: Diagnosis) -> dict[str, dict[str, Any]]:
    """Marks of a diagnosis's rows."""
    return marks(diagnosis.rows, diagnosis.upstream)


def row_legend(figure: "Figure", axes: "Axes", title: str) -> None:
    """Put a legend of rows below, in as many columns as their names leave room for."""
    handles, labels = axes.get_legend_handles_labels()
    columns = int(_LETTERS * figure.get_figwidth() / (max(map(len, labels)) + 7))
    columns = max(1, min(columns, 4))
    figure.set_figheight(figure.get_figheight() + 0.18 * (len(labels) // columns))
    legend_below(figure, handles, labels, title, columns)


def _dots(
    diagnosis: Diagnosis, values: Mapping[str, Mapping[str, float]], label: str, title: str
) -> "Figure | None":
    """One line for each task, one mark for each row."""
    if not values:
        return None
    names = short_names(diagnosis.tasks)
    figure = new_figure(6.4, 1.7 + 0.36 * len(names))
    axes = figure.subplots()
    for row, look in looks_of(diagnosis).items():
        known = [task for task in names if task in values.get(row, {})]
        if known:
            heights = [-diagnosis.tasks.index(task) for task in known]
            numbers = [values[row][task] for task in known]
            label_of = f"{row} ({np.mean(numbers):.3f})"
            axes.plot(numbers, heights, linestyle="none", label=label_of, **look)
    axes.set_yticks([-place for place in range(len(names))], list(names.values()))
    axes.set_ylim(-len(names) + 0.4, 0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid()
    axes.set_xlabel(label)
    axes.set_title(title)
    row_legend(figure, axes, "row (mean over tasks)")
    return figure


def cosine_figure(diagnosis: Diagnosis) -> "Figure | None":
    """Mean cosine of final features to the expert's, by task."""
    values = {r: {t: diagnosis.cosine(r, t) for t in diagnosis.tasks} for r in diagnosis.rows}
    title = with_items(diagnosis, "final features by task")
    return _dots(diagnosis, values, "mean cosine to the expert's", title)


def vector_figure(diagnosis: Diagnosis) -> "Figure | None":
    """Cosine to the expert's task vector, by task; None without a base."""
    label = "cosine of model - base and expert - base"
    return _dots(diagnosis, diagnosis.task_vectors, label, titled(diagnosis, "task vectors"))


def items_figure(diagnosis: Diagnosis) -> "Figure":
    """Share of items whose final cosine is at most a value, by task."""
    titles = list(short_names(diagnosis.tasks).values())
    heading = with_items(diagnosis, "final features by item")
    label = "cosine to the expert's"
    figure, grid = panels(titles, (2.7, 2.1), ACROSS, heading, label, sharey=True, sharex=False)
    for axes, task in zip(grid, diagnosis.tasks, strict=True):
        for row, look in looks_of(diagnosis).items():
            values = np.sort(diagnosis.cosines[row][task])
            shares = np.arange(1, len(values) + 1) / len(values)
            axes.plot(values, 100 * shares, label=row, linewidth=1.6, markevery=(0.1, 0.2),
                      **{**look, "markersize": 6})  # fmt: skip
    figure.supylabel("items with at most this cosine, %", fontsize=10)
    row_legend(figure, grid[0], "row")
    return figure


def gains_figure(diagnosis: Diagnosis) -> "Figure | None":
    """Gain of cosine against gain of accuracy: a panel for each calibrated row, a mark a task."""
    from matplotlib.ticker import MaxNLocator

    rows = [row for row in diagnosis.repairs if diagnosis.merged and row in diagnosis.accuracy]
    if not rows:
        return None
    names = short_names(diagnosis.tasks)
    heading = titled(diagnosis, f"gains over {diagnosis.merged}, by task")
    label = "gain of final cosine"
    figure, grid = panels(rows, (3.4, 2.8), 2, heading, label, sharey=True, sharex=False)
    labelled = []
    for axes, row in zip(grid, rows, strict=True):
        look = looks_of(diagnosis)[row]
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.axvline(0, color=GREY, linewidth=0.8)
        gains = gains_of(diagnosis, row, diagnosis.merged or "")
        points = {names[task]: (cosine, 100 * gain) for task, (cosine, gain) in gains.items()}
        for place in points.values():
            axes.plot(*place, linestyle="none", **look)
        axes.margins(y=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        labelled.append((axes, points))
    for axes, points in labelled:  # when the scale that they share is known
        _label_points(axes, points)
    figure.supylabel("gain of accuracy, points", fontsize=10)
    return figure


def _label_points(axes: "Axes", points: Mapping[str, tuple[float, float]]) -> None:
    """Write names at the right margin, one above another, with a thin line to each point."""
    low, high = axes.get_ylim()
    least = 0.075 * (high - low)  # of a line of text
    height = -np.inf
    for name, place in sorted(points.items(), key=lambda entry: entry[1][1]):
        height = max(place[1], height + least)
        axes.annotate(name, place, xytext=(1.03, height), textcoords=axes.get_yaxis_transform(),
                      fontsize=8, va="center", annotation_clip=False,
                      arrowprops={"arrowstyle": "-", "color": RULE, "shrinkB": 3})  # fmt: skip


def class_figure(diagnosis: Diagnosis) -> "Figure | None":
    """One line for each task, one mark for each class: gain in final cosine."""
    gains = {row: by_cosine(class_gains(diagnosis, row)) for row in diagnosis.repairs}
    rows = [row for row, known in gains.items() if known]
    if not rows:
        return None
    names = short_names(diagnosis.tasks)
    heading = with_items(diagnosis, f"gain over {diagnosis.merged} by class")
    label = "gain of final cosine (line: mean over classes)"
    figure, grid = panels(rows, (3.2, 0.7 + 0.34 * len(names)), 2, heading, label, sharey=True)
    for axes, row in zip(grid, rows, strict=True):
        look = looks_of(diagnosis)[row]
        axes.axvline(0, color=GREY, linewidth=0.8)
        for place, task in enumerate(diagnosis.tasks):
            values = [gain.cosine or 0.0 for gain in gains[row] if gain.task == task]
            axes.plot(values, [-place] * len(values), linestyle="none", alpha=0.55,
                      **{**look, "markersize": 5})  # fmt: skip
            if values:
                axes.plot(np.mean(values), -place, "|", color=INK, markersize=16, markeredgewidth=2)
        axes.set_yticks([-place for place in range(len(names))], list(names.values()))
        axes.set_ylim(-len(names) + 0.4, 0.6)
    return figure


def class_gains_figure(diagnosis: Diagnosis) -> "Figure | None":
    """Gain of cosine against gain of accuracy: a panel for each calibrated row, a mark a class."""
    pairs = {row: correlated(class_gains(diagnosis, row)) for row in diagnosis.repairs}
    rows = [row for row, known in pairs.items() if known]
    if not rows:
        return None
    items = max(diagnosis.items.values())
    heading = titled(
        diagnosis,
        f"gains over {diagnosis.merged}, by class\n"
        f"(cosine: up to {items} {diagnosis.split} items of each task; accuracy: all test items)",
    )
    label = "gain of final cosine"
    figure, grid = panels(rows, (3.4, 2.8), 2, heading, label, sharey=True, sharex=False)
    names = short_names(diagnosis.tasks)
    for axes, row in zip(grid, rows, strict=True):
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.axvline(0, color=GREY, linewidth=0.8)
        for place, task in enumerate(diagnosis.tasks):
            own = [gain for gain in pairs[row] if gain.task == task]
            across = [gain.cosine or 0.0 for gain in own]
            up = [100 * (gain.accuracy or 0.0) for gain in own]
            axes.plot(across, up, linestyle="none", marker=_TASKS[place % len(_TASKS)],
                      color=PALETTE[place % len(PALETTE)], markersize=5.5, markeredgewidth=0,
                      alpha=0.75, label=names[task])  # fmt: skip
    figure.supylabel("gain of accuracy, points", fontsize=10)
    title = f"a mark is a class with {LEAST_ITEMS} items or more; task:"
    legend_below(figure, *grid[0].get_legend_handles_labels(), title)
    return figure
