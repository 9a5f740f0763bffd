"""Columns of tables of rows: a head, a row's cell, and a meaning for the legend."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .cost import (
    MODULES_ADDED,
    PARAMETERS_ADDED,
    SECONDS_PER_SAMPLE,
    SETTINGS_TRIED,
    TASK_ID,
    TOTAL_SECONDS,
    UNSEEN,
    UNSEEN_GAIN,
    UNSEEN_TASKS,
)
from .intervals import LEVEL
from .long_table import AVERAGE, BASE, NORMALISED, UNAVAILABLE
from .summary import SummaryRow
from .tables import ABSENT, WORST, percent, with_unit, worst_cells


class Column(NamedTuple):
    """A column of a table of rows."""

    head: str
    cell: Callable[[SummaryRow], str]
    meaning: str = ""  # sentence of the legend, where the head does not say it


def _average(row: SummaryRow) -> str:
    return row.average.text()


def _normalised(row: SummaryRow) -> str:
    if row.normalised is None:
        return ABSENT
    return row.interval(row.normalised, row.spread.get(NORMALISED)).text()


def _gain(row: SummaryRow) -> str:
    """Return the gain over the upstream merger in points."""
    return f"{100 * row.gain:+z.1f}" if row.gain is not None and row.is_repair else ABSENT


def _gain_limits(row: SummaryRow) -> str:
    limits = row.gain_interval if row.is_repair else None
    return limits.limits() if limits else ABSENT


def _recovered(row: SummaryRow) -> str:
    """Return the recovered gap in per cent."""
    has_share = row.recovered_gap is not None and row.name not in (BASE, row.upstream)
    return with_unit(row.recovered_gap) if has_share else ABSENT


def _recovered_limits(row: SummaryRow) -> str:
    limits = row.recovered_gap_interval if row.is_repair else None
    return limits.limits(".0f") if limits else ABSENT


def _with_limits(
    value: Callable[[SummaryRow], str], limits: Callable[[SummaryRow], str]
) -> Callable[[SummaryRow], str]:
    """Return a cell of a value and its interval, if there is one."""

    def cell(row: SummaryRow) -> str:
        return value(row) if limits(row) == ABSENT else f"{value(row)} {limits(row)}"

    return cell


def _worst(head: str) -> Callable[[SummaryRow], str]:
    return lambda row: worst_cells(row.worst, row.tasks)[head]


def _unseen(row: SummaryRow) -> str:
    average, gain, tasks = (row.cost.get(key) for key in (UNSEEN, UNSEEN_GAIN, UNSEEN_TASKS))
    if isinstance(average, float) and isinstance(gain, float):
        return f"{percent(average)} ({100 * gain:+z.1f}, {tasks:.0f})"
    return ABSENT if tasks is None else "none left"


def _cost(key: str, form: str = ".0f", unit: float = 1) -> Callable[[SummaryRow], str]:
    """Return a cell of a cost in a unit, with half of its 95 % interval where it is a time."""

    def cell(row: SummaryRow) -> str:
        value = row.cost.get(key, ABSENT)
        if not isinstance(value, int | float):
            return str(value)
        deviation = row.spread.get(key) if "seconds" in key else None
        return row.interval(value, deviation).text(form, 1 / unit)

    return cell


def _added(row: SummaryRow) -> str:
    modules, parameters = (_cost(key)(row) for key in (MODULES_ADDED, PARAMETERS_ADDED))
    return ABSENT if modules == ABSENT else f"{modules} / {parameters}"


GAIN = Column(
    "gain over merger",
    _with_limits(_gain, _gain_limits),
    f"gain over merger: points, with the {100 * LEVEL:.0f} % interval over test items (paired "
    "bootstrap) and, if there are several, seeds (Student's t)",
)
RECOVERED = Column(
    "recovered gap",
    _with_limits(_recovered, _recovered_limits),
    "recovered gap: (row - merged) / (experts - merged), averages, with an interval as for the "
    "gain",
)
WORST_COLUMNS = [
    Column(
        WORST[0],
        _worst(WORST[0]),
        "worst task: smallest share recovered, of the tasks with a gap of a point or more",
    ),
    Column(WORST[1], _worst(WORST[1])),
]
ACCURACY = [
    Column(AVERAGE, _average),
    Column(
        NORMALISED, _normalised, "normalised: mean over tasks of accuracy / the expert's accuracy"
    ),
    GAIN,
    RECOVERED,
    *WORST_COLUMNS,
    Column(
        "unseen (gain, tasks)",
        _unseen,
        "unseen: accuracy of corrections trained on test samples, on the other test items, with "
        "the gain over the merger there and the number of tasks that have any",
    ),
]
COSTS = [
    Column(
        "task id",
        lambda row: str(row.cost.get(TASK_ID, ABSENT)),
        "task id: whether inference needs the task of each input",
    ),
    Column(
        "modules / parameters",
        _added,
        "modules / parameters: added to the merged model's, over all tasks",
    ),
    Column(
        "settings tried",
        _cost(SETTINGS_TRIED),
        "settings tried: number of candidates compared on unlabeled calibration samples",
    ),
    Column(
        "seconds",
        _cost("seconds", ".2f"),
        "seconds: of merging for a merger, of the method for others, reading data included, "
        "evaluation not",
    ),
    Column("with merger", _cost(TOTAL_SECONDS, ".2f")),
    Column(
        "memory, MiB",
        _cost("peak_rss_bytes", unit=2**20),
        "memory: peak resident memory of the process and its children, framework included",
    ),
    Column("GPU memory, MiB", _cost("peak_accelerator_bytes", unit=2**20)),
    Column(
        "GPU energy, Wh",
        _cost("gpu_energy_wh", ".3g"),
        "GPU energy: drawn by the GPUs in use, as a whole",
    ),
    Column(
        "ms / sample",
        _cost(SECONDS_PER_SAMPLE, ".2f", unit=1e-3),
        "ms / sample: inference in batches, from pixels to final features, or an answer of a "
        "fixed number of tokens",
    ),
    Column("samples", lambda row: row.samples or ABSENT, "samples: per task, with their split"),
    Column("seeds", lambda row: ", ".join(map(str, row.seeds)) or ABSENT),
]
# Values and intervals apart keep the columns of a single run narrow.
ONE_RUN = [
    GAIN._replace(cell=_gain),
    Column("gain interval", _gain_limits),
    RECOVERED._replace(cell=_recovered),
    Column("gap interval", _recovered_limits),
    *WORST_COLUMNS,
    Column("seconds", _cost("seconds", ".1f")),
]


def with_values(columns: Iterable[Column], rows: Sequence[SummaryRow]) -> list[Column]:
    """Return the columns in which some row has a value."""
    empty = {ABSENT, UNAVAILABLE}
    return [column for column in columns if not {column.cell(row) for row in rows} <= empty]


def csv_line(row: SummaryRow) -> dict[str, Any]:
    """Return everything about a row, one value for each key."""
    line: dict[str, Any] = {
        "suite": row.suite,
        "upstream": row.upstream,
        "name": row.name,
        "runs": len(row.run_seeds),
        "seeds": " ".join(map(str, row.seeds)),
        "samples": row.samples,
        "worst_task": row.worst_task,
        "worst_recovered_gap": row.worst_recovered_gap,
        "normalised": row.normalised,
        "gain": row.gain,
        "recovered_gap": row.recovered_gap,
    }
    intervals = {"gain": row.gain_interval, "recovered_gap": row.recovered_gap_interval}
    for name, limits in intervals.items():
        line |= {f"{name}_{end}": limits and getattr(limits, end) for end in ("low", "high")}
    mappings = {
        "accuracy": row.accuracy, "deviation": row.deviation, "loss": row.loss, "cost": row.cost,
        "cost_deviation": row.spread,
    }  # fmt: skip
    for name, values in mappings.items():
        line |= {f"{name}.{key}": value for key, value in (values or {}).items()}
    return {k: f"{v:.6f}" if isinstance(v, float) else v for k, v in line.items()}
