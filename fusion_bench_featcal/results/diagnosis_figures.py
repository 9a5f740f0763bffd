"""Figures of a diagnosis: the paper's Figures 1, 2 and 6 from our own runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .diagnosis import Diagnosis
from .diagnosis_page import class_gains, drift_change
from .drawing import (
    CALIBRATED,
    GREY,
    INK,
    MERGED,
    PALETTE,
    RULE,
    legend_below,
    marks,
    new_figure,
    panels,
    style,
)
from .findings import gains_of
from .long_table import EXPERTS
from .tables import short_blocks, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACROSS = 3
_FEW_BLOCKS = 12  # of which each has its name below the axis
_KINDS = {"pca": "PCA", "tsne": "t-SNE"}
_TERMS = {"drift": (INK, "-", "drift"), "mismatch": (PALETTE[4], "--", "local mismatch"),
          "propagation": (PALETTE[2], ":", "upstream propagation")}  # fmt: skip


def diagnosis_figures(diagnosis: Diagnosis) -> "dict[str, Figure]":
    """Draw every figure that the numbers allow, by file name."""
    with style():
        figures: dict[str, Any] = {name: draw(diagnosis) for name, draw in _FIGURES.items()}
        for kind, planes in diagnosis.projections.items():
            figures[kind] = _plane_figure(diagnosis, kind, planes)
    return {name: figure for name, figure in figures.items() if figure is not None}


def _title(diagnosis: Diagnosis, text: str) -> str:
    return f"{diagnosis.suite}: {text}"


def _label_blocks(axes: "Axes", blocks: Sequence[str]) -> None:
    labels = short_blocks(blocks)
    every = -(-len(blocks) // _FEW_BLOCKS)
    places = range(0, len(blocks), every)
    axes.set_xticks(places, [labels[place] for place in places])
    if max(map(len, labels)) > 3:
        axes.tick_params(axis="x", labelrotation=60)


def _lines(axes: "Axes", diagnosis: Diagnosis, values: Mapping[str, Any]) -> None:
    for row, look in marks(diagnosis.rows, diagnosis.upstream).items():
        axes.plot(values[row], linewidth=1.8, label=row, **{**look, "markersize": 6})
    _label_blocks(axes, diagnosis.blocks)


def _depth_figure(diagnosis: Diagnosis) -> "Figure":
    measures = {
        "relative": "drift / expert's norm",
        "drift": "drift, L2",
        "cosine": "cosine to the expert",
    }
    figure, grid = panels(
        list(measures.values()), (2.9, 2.6), 3, _title(diagnosis, "drift, mean over tasks"), "block"
    )
    for axes, measure in zip(grid, measures, strict=True):
        _lines(axes, diagnosis, {row: diagnosis.mean(row, measure) for row in diagnosis.rows})
        if measure != "cosine":
            axes.set_ylim(bottom=0)
    legend_below(figure, *grid[0].get_legend_handles_labels(), "row")
    return figure


def _tasks_figure(diagnosis: Diagnosis) -> "Figure":
    titles = list(short_names(diagnosis.tasks).values())
    figure, grid = panels(
        titles, (2.7, 2.1), _ACROSS, _title(diagnosis, "drift by task"), "block", sharey=True
    )
    for axes, task in zip(grid, diagnosis.tasks, strict=True):
        _lines(axes, diagnosis, {r: diagnosis.drift[r][task]["relative"] for r in diagnosis.rows})
        axes.set_ylim(bottom=0)
    figure.supylabel("drift / expert's norm", fontsize=10)
    legend_below(figure, *grid[0].get_legend_handles_labels(), "row")
    return figure


def _split_figure(diagnosis: Diagnosis) -> "Figure":
    rows = [*([diagnosis.merged] if diagnosis.merged else []), *diagnosis.repairs]
    rows = rows or diagnosis.rows
    heading = _title(diagnosis, "drift = local mismatch + upstream propagation, mean over tasks")
    figure, grid = panels(rows, (2.9, 2.5), _ACROSS, heading, "block", sharey=True)
    for axes, row in zip(grid, rows, strict=True):
        for measure, (colour, dashes, label) in _TERMS.items():
            axes.plot(diagnosis.mean(row, measure), color=colour, linestyle=dashes, marker="o",
                      markersize=4, linewidth=2, label=label)  # fmt: skip
        _label_blocks(axes, diagnosis.blocks)
        axes.set_ylim(bottom=0)
    figure.supylabel("mean L2 norm", fontsize=10)
    legend_below(figure, *grid[0].get_legend_handles_labels(), "")
    return figure


def _change_figure(diagnosis: Diagnosis) -> "Figure | None":
    """Tasks down, blocks across: change of relative drift by the first calibrated row."""
    if diagnosis.merged is None or not diagnosis.repairs:
        return None
    row = diagnosis.repairs[0]
    change = drift_change(diagnosis, row)
    table = 100 * np.array(list(change.values()))
    blocks = short_blocks(diagnosis.blocks)
    figure = new_figure(2.6 + 0.62 * max(len(blocks), 6), 1.5 + 0.36 * len(table))
    axes = figure.subplots()
    reach = max(abs(table).max(), 1e-9)
    axes.pcolormesh(table, cmap="PuOr_r", vmin=-reach, vmax=reach, edgecolors="white")
    for (line, column), value in np.ndenumerate(table):
        strong = abs(value) > 0.6 * reach
        axes.text(column + 0.5, line + 0.5, f"{value:+.0f}", ha="center", va="center", fontsize=9,
                  color="white" if strong else INK)  # fmt: skip
    names = short_names(diagnosis.tasks)
    axes.set_yticks(np.arange(len(table)) + 0.5, [names[task] for task in change])
    axes.set_xticks(np.arange(len(blocks)) + 0.5, blocks)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.set_xlabel("block")
    axes.set_title(_title(diagnosis, f"change of drift, {row}\nagainst {diagnosis.merged}, %"))
    return figure


def _dots(
    diagnosis: Diagnosis, values: Mapping[str, Mapping[str, float]], label: str, title: str
) -> "Figure | None":
    """One line for each task, one mark for each row."""
    if not values:
        return None
    names = short_names(diagnosis.tasks)
    figure = new_figure(6.4, 1.7 + 0.36 * len(names))
    axes = figure.subplots()
    for row, look in marks(diagnosis.rows, diagnosis.upstream).items():
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
    axes.set_title(_title(diagnosis, title))
    legend_below(figure, *axes.get_legend_handles_labels(), "row (mean over tasks)")
    return figure


def _cosine_figure(diagnosis: Diagnosis) -> "Figure | None":
    values = {r: {t: diagnosis.cosine(r, t) for t in diagnosis.tasks} for r in diagnosis.rows}
    return _dots(diagnosis, values, "mean cosine to the expert's", "final features by task")


def _vector_figure(diagnosis: Diagnosis) -> "Figure | None":
    label = "cosine of model - base and expert - base"
    return _dots(diagnosis, diagnosis.task_vectors, label, "task vectors")


def _items_figure(diagnosis: Diagnosis) -> "Figure":
    """Share of items whose final cosine is at most a value, by task."""
    titles = list(short_names(diagnosis.tasks).values())
    heading = _title(diagnosis, "final features by item")
    label = "cosine to the expert's"
    figure, grid = panels(titles, (2.7, 2.1), _ACROSS, heading, label, sharey=True, sharex=False)
    for axes, task in zip(grid, diagnosis.tasks, strict=True):
        for row, look in marks(diagnosis.rows, diagnosis.upstream).items():
            values = np.sort(diagnosis.cosines[row][task])
            shares = np.arange(1, len(values) + 1) / len(values)
            axes.plot(values, 100 * shares, label=row, linewidth=1.6, markevery=(0.1, 0.2),
                      **{**look, "markersize": 6})  # fmt: skip
    figure.supylabel("items with at most this cosine, %", fontsize=10)
    legend_below(figure, *grid[0].get_legend_handles_labels(), "row")
    return figure


def _gains_figure(diagnosis: Diagnosis) -> "Figure | None":
    rows = [row for row in diagnosis.repairs if diagnosis.merged and row in diagnosis.accuracy]
    if not rows:
        return None
    names = short_names(diagnosis.tasks)
    heading = _title(diagnosis, f"gains over {diagnosis.merged}, by task")
    label = "gain of final cosine"
    figure, grid = panels(rows, (3.4, 2.8), 2, heading, label, sharey=True, sharex=False)
    for axes, row in zip(grid, rows, strict=True):
        look = marks(diagnosis.rows, diagnosis.upstream)[row]
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.axvline(0, color=GREY, linewidth=0.8)
        gains = gains_of(diagnosis, row, diagnosis.merged or "")
        for number, (task, (cosine, points)) in enumerate(sorted(gains.items(), key=_by_height)):
            axes.plot(cosine, 100 * points, linestyle="none", **look)
            side = 1 if number % 2 else -1
            axes.annotate(names[task], (cosine, 100 * points), xytext=(6 * side, 0),
                          textcoords="offset points", fontsize=8, va="center",
                          ha="left" if side > 0 else "right")  # fmt: skip
        axes.margins(x=0.45, y=0.12)
    figure.supylabel("gain of accuracy, points", fontsize=10)
    return figure


def _by_height(entry: tuple[str, tuple[float, float]]) -> float:
    return entry[1][1]


def _class_figure(diagnosis: Diagnosis) -> "Figure | None":
    """One line for each task, one mark for each class: gain in final cosine."""
    rows = [row for row in diagnosis.repairs if diagnosis.merged and class_gains(diagnosis, row)]
    if not rows:
        return None
    names = short_names(diagnosis.tasks)
    heading = _title(diagnosis, f"gain over {diagnosis.merged} by class")
    label = "gain of final cosine (line: mean over classes)"
    figure, grid = panels(rows[:2], (3.2, 0.7 + 0.34 * len(names)), 2, heading, label, sharey=True)
    for axes, row in zip(grid, rows, strict=False):
        look = marks(diagnosis.rows, diagnosis.upstream)[row]
        gains = class_gains(diagnosis, row)
        axes.axvline(0, color=GREY, linewidth=0.8)
        for place, task in enumerate(diagnosis.tasks):
            values = [gain for (name, _), gain in gains if name == task]
            axes.plot(values, [-place] * len(values), linestyle="none", alpha=0.55,
                      **{**look, "markersize": 5})  # fmt: skip
            if values:
                axes.plot(np.mean(values), -place, "|", color=INK, markersize=16, markeredgewidth=2)
        axes.set_yticks([-place for place in range(len(names))], list(names.values()))
        axes.set_ylim(-len(names) + 0.4, 0.6)
    return figure


def _plane_figure(
    diagnosis: Diagnosis, kind: str, planes: Mapping[str, Mapping[str, Any]]
) -> "Figure":
    names = short_names(diagnosis.tasks)
    name = _KINDS[kind]
    heading = _title(diagnosis, f"final features, {name} fitted to each task's rows together")
    figure, grid = panels(
        [names[task] for task in planes], (2.5, 2.3), _ACROSS, heading, "", sharex=False
    )
    looks: dict[str, dict[str, Any]] = {EXPERTS: {"color": INK, "marker": "."}}
    for axes, rows in zip(grid, planes.values(), strict=True):
        for row, points in rows.items():
            merged = {"color": MERGED, "marker": "s"}
            look = looks.get(row, merged if row == diagnosis.upstream else _REPAIRED)
            across, up = zip(*points, strict=True)
            axes.scatter(across, up, s=13 if row == EXPERTS else 11, linewidths=0.8, alpha=0.7,
                         label="experts" if row == EXPERTS else row, marker=look["marker"],
                         facecolors="none" if row == diagnosis.upstream else look["color"],
                         edgecolors=look["color"])  # fmt: skip
        axes.set_xticks([])
        axes.set_yticks([])
        axes.grid(visible=False)
        for side in axes.spines.values():
            side.set_visible(True)
            side.set_color(RULE)
    legend_below(figure, *grid[0].get_legend_handles_labels(), "same items of each row")
    return figure


_REPAIRED = {"color": CALIBRATED, "marker": "^"}
_FIGURES: "Mapping[str, Callable[[Diagnosis], Figure | None]]" = {
    "drift_depth": _depth_figure,
    "drift_tasks": _tasks_figure,
    "drift_split": _split_figure,
    "drift_change": _change_figure,
    "final_cosine": _cosine_figure,
    "final_cosine_items": _items_figure,
    "gains": _gains_figure,
    "task_vectors": _vector_figure,
    "classes": _class_figure,
}
