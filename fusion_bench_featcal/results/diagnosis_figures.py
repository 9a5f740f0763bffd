"""Figures of a diagnosis: the paper's Figures 1, 2 and 6 from our own runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .diagnosis import Diagnosis
from .diagnosis_page import drift_change
from .drawing import (
    INK,
    PALETTE,
    legend_below,
    panels,
    style,
)
from .feature_figures import (
    ACROSS,
    class_figure,
    class_gains_figure,
    cosine_figure,
    gains_figure,
    items_figure,
    looks_of,
    row_legend,
    vector_figure,
    with_positions,
)
from .projection_figures import plane_figure
from .tables import short_blocks, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW_BLOCKS = 12  # of which each has its name below the axis
_WIDEST = 8.0  # of panels side by side, in inches
TERMS = {"drift": (INK, "-", "drift"), "mismatch": (PALETTE[4], "--", "local mismatch"),
          "propagation": (PALETTE[2], ":", "upstream propagation")}  # fmt: skip


def diagnosis_figures(diagnosis: Diagnosis) -> "dict[str, Figure]":
    """Draw every figure that the numbers allow, by file name."""
    with style():
        figures: dict[str, Any] = {name: draw(diagnosis) for name, draw in _FIGURES.items()}
        for kind, planes in diagnosis.projections.items():
            figures[kind] = plane_figure(diagnosis, kind, planes)
    return {name: figure for name, figure in figures.items() if figure is not None}


def _label_blocks(axes: "Axes", blocks: Sequence[str]) -> None:
    labels = short_blocks(blocks)
    every = -(-len(blocks) // _FEW_BLOCKS)
    places = range(0, len(blocks), every)
    axes.set_xticks(places, [labels[place] for place in places])
    if max(map(len, labels)) > 3:
        axes.tick_params(axis="x", labelrotation=60)


def _lines(axes: "Axes", diagnosis: Diagnosis, values: Mapping[str, Any]) -> None:
    for row, look in looks_of(diagnosis).items():
        axes.plot(values[row], linewidth=1.8, label=row, **{**look, "markersize": 6})
    _label_blocks(axes, diagnosis.blocks)


def _depth_figure(diagnosis: Diagnosis) -> "Figure":
    measures = {
        "relative": "drift / expert's norm",
        "drift": "drift, L2",
        "cosine": "cosine to the expert",
    }
    figure, grid = panels(
        list(measures.values()),
        (2.9, 2.6),
        3,
        with_positions(diagnosis, "drift, mean over tasks"),
        "block",
    )
    for axes, measure in zip(grid, measures, strict=True):
        _lines(axes, diagnosis, {row: diagnosis.mean(row, measure) for row in diagnosis.rows})
        if measure != "cosine":
            axes.set_ylim(bottom=0)
    row_legend(figure, grid[0], "row")
    return figure


def _tasks_figure(diagnosis: Diagnosis) -> "Figure":
    titles = list(short_names(diagnosis.tasks).values())
    figure, grid = panels(
        titles, (2.7, 2.1), ACROSS, with_positions(diagnosis, "drift by task"), "block", sharey=True
    )
    for axes, task in zip(grid, diagnosis.tasks, strict=True):
        _lines(axes, diagnosis, {r: diagnosis.drift[r][task]["relative"] for r in diagnosis.rows})
    grid[0].set_ylim(bottom=0)  # all panels share it
    figure.supylabel("drift / expert's norm", fontsize=10)
    row_legend(figure, grid[0], "row")
    return figure


def _split_figure(diagnosis: Diagnosis) -> "Figure":
    rows = [*([diagnosis.merged] if diagnosis.merged else []), *diagnosis.repairs]
    rows = rows or diagnosis.rows
    heading = with_positions(
        diagnosis, "drift = local mismatch + upstream propagation, mean over tasks"
    )
    figure, grid = panels(rows, (2.9, 2.5), ACROSS, heading, "block", sharey=True)
    for axes, row in zip(grid, rows, strict=True):
        for measure, (colour, dashes, label) in TERMS.items():
            axes.plot(diagnosis.mean(row, measure), color=colour, linestyle=dashes, marker="o",
                      markersize=4, linewidth=2, label=label)  # fmt: skip
        _label_blocks(axes, diagnosis.blocks)
    grid[0].set_ylim(bottom=0)  # all panels share it
    figure.supylabel("mean L2 norm", fontsize=10)
    legend_below(figure, *grid[0].get_legend_handles_labels(), "")
    return figure


def _change_figure(diagnosis: Diagnosis) -> "Figure | None":
    """Change of relative drift: a panel for each calibrated row, tasks down, blocks across."""
    rows = diagnosis.repairs if diagnosis.merged else []
    if not rows:
        return None
    tables = [100 * np.array(list(drift_change(diagnosis, row).values())) for row in rows]
    names, blocks = list(short_names(diagnosis.tasks).values()), short_blocks(diagnosis.blocks)
    heading = with_positions(diagnosis, f"change of drift against {diagnosis.merged}, %")
    size = (0.4 + 0.56 * max(len(blocks), 4), 0.7 + 0.32 * len(names))
    across = max(1, int(_WIDEST / size[0]))
    figure, grid = panels(rows, size, across, heading, "block", sharey=True)
    reach = max(abs(table).max() for table in tables) or 1.0
    for axes, table in zip(grid, tables, strict=True):
        axes.grid(visible=False)
        axes.pcolormesh(table, cmap="PuOr_r", vmin=-reach, vmax=reach, edgecolors="white")
        for (line, column), value in np.ndenumerate(table):
            strong = abs(value) > 0.5 * reach
            axes.text(column + 0.5, line + 0.5, f"{value:+.0f}", ha="center", va="center",
                      fontsize=8.5, color="white" if strong else INK)  # fmt: skip
        axes.set_xticks(np.arange(len(blocks)) + 0.5, blocks)
        if max(map(len, blocks)) > 3:
            axes.tick_params(axis="x", labelrotation=60)
        axes.tick_params(length=0)
    grid[0].set_yticks(np.arange(len(names)) + 0.5, names)
    grid[0].invert_yaxis()  # all panels share it
    return figure


_FIGURES: "Mapping[str, Callable[[Diagnosis], Figure | None]]" = {
    "drift_depth": _depth_figure,
    "drift_tasks": _tasks_figure,
    "drift_split": _split_figure,
    "drift_change": _change_figure,
    "final_cosine": cosine_figure,
    "final_cosine_items": items_figure,
    "gains": gains_figure,
    "task_vectors": vector_figure,
    "classes": class_figure,
    "class_gains": class_gains_figure,
}
