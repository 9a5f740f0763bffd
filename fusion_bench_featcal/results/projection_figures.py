"""Figures of final features in a plane: every row's beside the expert's, of the same items."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .diagnosis import Diagnosis
from .drawing import GREY, INK, RULE, legend_below, new_figure
from .feature_figures import looks_of, span, titled
from .long_table import EXPERTS
from .tables import short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {"pca": "PCA"}
_PANEL = (1.95, 1.6)  # inches


def plane_figure(
    diagnosis: Diagnosis, kind: str, planes: Mapping[str, Mapping[str, Any]]
) -> "Figure":
    """Tasks down, rows across: a row's features and the expert's.

    The panels of a task have one projection and one scale, so that rows compare.

    Args:
        diagnosis: The diagnosis.
        kind: `pca`.
        planes: Task -> row -> two coordinates of each item.
    """
    names, looks = short_names(diagnosis.tasks), looks_of(diagnosis)
    rows = [row for row in next(iter(planes.values())) if row != EXPERTS]
    width, height = _PANEL[0] * len(rows) + 0.4, _PANEL[1] * len(planes) + 1.4
    figure = new_figure(max(width, 5.0), height)
    grid = figure.subplots(len(planes), len(rows), squeeze=False, sharex="row", sharey="row")
    for line, (task, points) in zip(grid, planes.items(), strict=True):
        for axes, row in zip(line, rows, strict=True):
            _draw(axes, points[EXPERTS], points[row], row, looks[row])
        line[0].set_ylabel(names[task], fontsize=10)
    for axes, row in zip(grid[0], rows, strict=True):
        axes.set_title(row.replace(":", ":\n"), fontsize=10)
    heading = f"final features, {_KINDS[kind]} fitted to all rows of a task together"
    figure.suptitle(titled(diagnosis, heading), x=0.01, ha="left", fontsize=11)
    drawn = dict(
        pair
        for axes in grid[0]
        for pair in zip(*reversed(axes.get_legend_handles_labels()), strict=True)
    )
    count = span([len(points[EXPERTS]) for points in planes.values()])
    title = f"{count} {diagnosis.split} items; lines lead to the same item in the expert"
    legend_below(figure, list(drawn.values()), list(drawn), title, 4 if width > 7 else 2)
    return figure


def _draw(axes: "Axes", expert: Any, points: Any, row: str, look: Mapping[str, Any]) -> None:
    """Draw items in a row and in the expert, with a line from one to the other."""
    from matplotlib.collections import LineCollection

    pairs = list(zip(expert, points, strict=True))
    axes.add_collection(LineCollection(pairs, colors=GREY, linewidths=0.6, alpha=0.6, zorder=0))
    for place, label, size, of in (
        (points, row, 16, look),
        (expert, EXPERTS, 12, {"color": INK, "marker": "."}),  # inside the row's where they meet
    ):
        across, up = zip(*place, strict=True)
        axes.scatter(across, up, s=size, linewidths=0, color=of["color"], marker=of["marker"],
                     alpha=0.85, label=label)  # fmt: skip
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(True)
        side.set_color(RULE)
