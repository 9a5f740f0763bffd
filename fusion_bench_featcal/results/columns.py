"""Names of the columns of `lines.csv` and `report.csv`.

Columns of tasks and costs have a prefix, and so does a setting that is named like a column. Names
of users thus never collide with columns.
"""

from collections.abc import Iterable

AVERAGE = "average"
"""The mean over tasks, which no task may be called."""
COST = "cost."
"""Prefix of metrics that are costs of a model. They have no task."""

DIMENSIONS = ("suite", "merger", "row", "task", "block", "seed", "metric")
"""Columns of the long table in addition to `VALUE`. A column that does not apply is empty."""
VALUE = "value"
ROW_COLUMNS = (
    "suite", "merger", "row", "gain", "half", "share", "worst_task", "worst_share", "worst_value",
    "seeds", "samples",
)  # fmt: skip
"""Columns of the table of models, in addition to settings that differ, values and costs."""
_TAKEN = {*DIMENSIONS, VALUE, *ROW_COLUMNS}


def value_column(metric: str, task: str) -> str:
    """Return the column of a metric of a task."""
    return f"{metric}.{task}"


def setting_column(key: str, metrics: Iterable[str] = ()) -> str:
    """Return the column of a setting that differs between models."""
    starts = ("setting.", COST, *(value_column(metric, "") for metric in metrics))
    return f"setting.{key}" if key in _TAKEN or key.startswith(starts) else key
