"""How trainings went: the losses that a run left in `training_curves.jsonl`, one line a task."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import LOG_DIR_SETTING, ReportError, write_atomic

CURVES_FILE = "training_curves.jsonl"

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
    except (AttributeError, TypeError, ValueError) as error:
        raise ReportError(f"{place}: a curve is a list of [step, loss]: {error}") from error
    for task, points in curves.items():
        steps = [step for step, _ in points]
        if steps != sorted(set(steps)) or not all(math.isfinite(loss) for _, loss in points):
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
    lines = [
        json.dumps({"name": name, "task": task, "losses": points}, allow_nan=False) + "\n"
        for name, tasks in curves.items()
        for task, points in tasks.items()
    ]
    if not lines:
        path.unlink(missing_ok=True)
        return None
    return write_atomic(path, "".join(lines), setting)


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
        for line in path.read_text().splitlines():
            record = json.loads(line)
            part = as_curves({record["task"]: record["losses"]}, str(path))
            curves.setdefault(record["name"], {}).update(part)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path} is damaged: {error}") from error
    return curves
