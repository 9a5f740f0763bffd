"""Columns of tables of rows: a head, a row's cell, and a meaning for the legend."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .intervals import LEVEL
from .long_table import BASE, UNAVAILABLE
from .summary import SummaryRow
from .tables import ABSENT, WORST, with_unit, worst_cells


class Column(NamedTuple):
    """A column of a table of rows."""

    head: str
    cell: Callable[[SummaryRow], str]
    meaning: str = ""  # sentence of the legend, if the head is not enough


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


def cost_cell(key: str, form: str = ".0f", unit: float = 1) -> Callable[[SummaryRow], str]:
    """Return a function for a cost cell in a unit, for times with half of the 95 % interval."""

    def cell(row: SummaryRow) -> str:
        value = row.cost.get(key, ABSENT)
        if not isinstance(value, int | float):
            return str(value)
        deviation = row.spread.get(key) if "seconds" in key else None
        return row.interval(value, deviation).text(form, 1 / unit)

    return cell


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
# Separate columns for values and intervals keep the columns of a single run narrow.
ONE_RUN = [
    GAIN._replace(cell=_gain),
    Column("gain interval", _gain_limits),
    RECOVERED._replace(cell=_recovered),
    Column("gap interval", _recovered_limits),
    *WORST_COLUMNS,
    Column("seconds", cost_cell("seconds", ".1f")),
]


def with_values(columns: Iterable[Column], rows: Sequence[SummaryRow]) -> list[Column]:
    """Return the columns in which some row has a value."""
    empty = {ABSENT, UNAVAILABLE}
    return [column for column in columns if not {column.cell(row) for row in rows} <= empty]
