"""How trainings went: the losses that a run left in `training_curves.jsonl`, and their figure."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .drawing import PALETTE, RULE, legend_below, new_figure, style
from .files import LOG_DIR_SETTING, ReportError, read_lines, sealed_lines, write_atomic
from .tables import short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES_FILE = "training_curves.jsonl"

_ACROSS = 3  # panels in a row of them
_DASHES = ("-", "--", ":", "-.")

Curves = dict[str, list[tuple[int, float]]]
"""Task -> steps done and loss, in order; step 0 is before training."""


def as_curves(content: Any, place: str) -> Curves:
    """Check curves that were read from JSON.

    Args:
        content: Task -> list of `[step, loss]`.
        place: Where they stand, for the error message.

    Raises:
        ReportError: They are something else, steps do not rise, or a loss is not finite.
    """
    try:
        curves = {
            str(task): [(int(step), float(loss)) for step, loss in points]
            for task, points in content.items()
        }
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ReportError(f"{place}: a curve is a list of [step, loss]: {error}") from error
    for task, points in curves.items():
        steps = [step for step, _ in points]
        finite = all(math.isfinite(loss) for _, loss in points)
        if not points or steps != sorted(set(steps)) or not finite:
            raise ReportError(f"{place}: task '{task}': steps must rise and losses be finite")
    return curves


def write_curves(
    directory: str | Path, curves: Mapping[str, Curves], setting: str = LOG_DIR_SETTING
) -> Path | None:
    """Write the curves of a run's rows; what an earlier run left is removed.

    Args:
        directory: An existing folder.
        curves: Row -> its curves; rows without any are left out.
        setting: The setting that chose the folder, named in error messages.

    Returns:
        The file; None where nothing was trained.

    Raises:
        ReportError: The file cannot be written.
    """
    path = Path(directory) / CURVES_FILE
    records = [
        {"name": name, "task": task, "losses": points}
        for name, tasks in curves.items()
        for task, points in tasks.items()
    ]
    if not records:
        path.unlink(missing_ok=True)
        return None
    return write_atomic(path, sealed_lines(records), setting)


def load_curves(directory: str | Path) -> dict[str, Curves]:
    """Read what `write_curves` wrote: row -> task -> (step, loss); empty where there is no file.

    Raises:
        ReportError: The file cannot be read or a line of it is damaged.
    """
    path = Path(directory) / CURVES_FILE
    if not path.exists():
        return {}
    curves: dict[str, Curves] = {}
    try:
        for record in read_lines(path):
            part = as_curves({record["task"]: record["losses"]}, str(path))
            curves.setdefault(str(record["name"]), {}).update(part)
    except (KeyError, TypeError) as error:
        raise ReportError(f"{path} is damaged: {error}") from error
    return curves


def convergence_figure(curves: Mapping[str, Curves], title: str = "") -> "Figure":
    """A panel for each trained method, a line for each task: its loss, relative to step 0.

    Args:
        curves: Row -> task -> (step, loss).
        title: Title of the figure.

    Raises:
        ReportError: matplotlib is missing or nothing was trained.
    """
    if not curves:
        raise ReportError("there are no training curves to draw: no method of the run trains")
    tasks = list(dict.fromkeys(task for rows in curves.values() for task in rows))
    across = min(len(curves), _ACROSS)
    down = -(-len(curves) // across)
    with style():
        figure = new_figure(1.0 + max(2.9 * across, 4.4), 1.2 + 2.4 * down)
        grid = figure.subplots(down, across, squeeze=False).flat
        lines: dict[str, Any] = {}
        for axes, (name, rows) in zip(grid, curves.items(), strict=False):
            lines |= _draw_trainings(axes, rows, tasks)
            axes.set_title(name, fontsize=10)
            axes.set_xlabel("updates", fontsize=9)
        for axes in grid[len(curves) :]:
            axes.remove()
        figure.supylabel("loss / loss before training", fontsize=10)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        names = short_names(tasks)
        labels = [names.get(task, task) for task in lines]
        legend_below(figure, list(lines.values()), labels, "", across + 2)
    return figure


def _draw_trainings(axes: "Axes", rows: Curves, tasks: Sequence[str]) -> dict[str, Any]:
    """One line a task; a task has the same colour in every panel."""
    lines = {}
    for task, points in rows.items():
        place = tasks.index(task)
        first = points[0][1] or 1.0
        look: dict[str, Any] = {
            "color": PALETTE[place % len(PALETTE)],
            "linestyle": _DASHES[place // len(PALETTE) % len(_DASHES)],
        }
        shares = [loss / first for _, loss in points]
        (lines[task],) = axes.plot([step for step, _ in points], shares, linewidth=1.5, **look)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
    return lines
