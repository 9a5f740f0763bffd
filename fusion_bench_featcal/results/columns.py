"""Columns of the tables and CSV files of several runs: a row's cells by the column's name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .cost import (
    CHOSEN,
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
from .items import Interval
from .long_table import AVERAGE, BASE, NORMALISED, UNAVAILABLE
from .summary import SummaryRow
from .tables import ABSENT, WORST, percent, with_unit, worst_cells


def average_cells(row: SummaryRow) -> dict[str, str]:
    """Average and what follows from it, for a combined report."""
    seconds = row.cost.get("seconds")
    return {
        "runs": str(len(row.run_seeds)),
        AVERAGE: _average_text(row),
        "gain over merged": _gain_text(row),
        "recovered gap": _recovered_text(row),
        **worst_cells(row.worst, row.tasks),
        "seconds": f"{seconds:.1f}" if isinstance(seconds, float) else ABSENT,
    }


def run_cells(row: SummaryRow) -> dict[str, str]:
    """The same for one run, behind its tasks; intervals apart, to keep the columns narrow."""
    gain, _, limits = _gain_text(row).partition(" ")
    share, _, share_limits = _recovered_text(row).partition(" [")
    cells = average_cells(row)
    return {
        "gain over merged": gain,
        "gain interval": limits or ABSENT,
        "recovered gap": share,
        "gap interval": f"[{share_limits}" if share_limits else ABSENT,
        **{head: cells[head] for head in (*WORST, "seconds")},
    }


def accuracy_cells(row: SummaryRow) -> dict[str, str]:
    """The same for a comparison."""
    return {
        AVERAGE: _average_text(row),
        NORMALISED: _spread(row, percent(row.normalised), row.spread.get(NORMALISED)),
        "gain over merger": _gain_text(row),
        "recovered gap": ABSENT if row.name == row.upstream else _recovered_text(row),
        **worst_cells(row.worst, row.tasks),
        "unseen (gain, tasks)": _unseen_text(row),
    }


def cost_cells(row: SummaryRow) -> dict[str, str]:
    """Costs of the row, of making it and at inference."""
    modules, parameters = (_cost(row, key) for key in (MODULES_ADDED, PARAMETERS_ADDED))
    return {
        "task id": str(row.cost.get(TASK_ID, ABSENT)),
        "modules / parameters": f"{modules} / {parameters}" if modules != ABSENT else ABSENT,
        "settings tried": _cost(row, SETTINGS_TRIED),
        "seconds": _cost(row, "seconds", "{:.2f}"),
        "with merger": _cost(row, TOTAL_SECONDS, "{:.2f}"),
        "memory, MiB": _cost(row, "peak_rss_bytes", unit=2**20),
        "GPU memory, MiB": _cost(row, "peak_accelerator_bytes", unit=2**20),
        "GPU energy, Wh": _cost(row, "gpu_energy_wh", "{:.3g}"),
        "ms / sample": _cost(row, SECONDS_PER_SAMPLE, "{:.2f}", unit=1e-3),
        "samples": row.samples or ABSENT,
        "seeds": ", ".join(map(str, row.seeds)) or ABSENT,
    }


def task_cells(row: SummaryRow) -> dict[str, str]:
    """Accuracy of each task, with half of its 95 % interval over runs."""
    return {
        task: _spread(row, percent(row.accuracy[task]), (row.deviation or {}).get(task))
        for task in row.tasks
    }


def columns_with_values(lines: Sequence[Mapping[str, str]]) -> list[str]:
    """Columns of the lines, without those in which no line has a value."""
    empty = {ABSENT, UNAVAILABLE}
    return [column for column in lines[0] if not {line[column] for line in lines} <= empty]


def csv_cells(row: SummaryRow) -> dict[str, Any]:
    """Everything about a row of a comparison; None for an empty cell."""

    def raw(*keys: str) -> dict[str, Any]:
        return {key: row.cost.get(key) for key in keys}

    return {
        "runs": len(row.run_seeds),
        AVERAGE: number(row.accuracy[AVERAGE]),
        "deviation": number((row.deviation or {}).get(AVERAGE)),
        NORMALISED: number(row.normalised),
        "normalised_deviation": number(row.spread.get(NORMALISED)),
        **with_limits("gain", row.gain, row.gain_interval),
        **raw(UNSEEN, UNSEEN_GAIN, UNSEEN_TASKS),
        **raw(TASK_ID, MODULES_ADDED, PARAMETERS_ADDED, SETTINGS_TRIED, CHOSEN, "seconds"),
        **raw(TOTAL_SECONDS),
        "seconds_deviation": number(row.spread.get("seconds")),
        **raw("peak_rss_bytes", "peak_accelerator_bytes", "gpu_energy_wh", SECONDS_PER_SAMPLE),
        "samples": row.samples,
        "seeds": " ".join(map(str, row.seeds)),
        "worst_task": row.worst_task,
        "worst_recovered_gap": number(row.worst_recovered_gap),
        "loss": number(row.loss.get(AVERAGE)),
    }


def _average_text(row: SummaryRow) -> str:
    return _spread(row, percent(row.accuracy[AVERAGE]), (row.deviation or {}).get(AVERAGE))


def _spread(
    row: SummaryRow,
    text: str,
    deviation: float | None,
    form: Callable[[float], str] = percent,
) -> str:
    """A mean over runs with half of its 95 % interval."""
    half = row.half_width(deviation)
    return text if half is None or text == ABSENT else f"{text} ± {form(half)}"


def _gain_text(row: SummaryRow) -> str:
    """Gain over the upstream merger in points, with its interval; a dash for the merger itself."""
    if row.gain is None or not row.is_repair:
        return ABSENT
    text, limits = f"{100 * row.gain:+z.1f}", row.gain_interval
    return text + (f" [{100 * limits.low:+z.1f}, {100 * limits.high:+z.1f}]" if limits else "")


def _unseen_text(row: SummaryRow) -> str:
    """Average on test items that the row was not trained on, gain over the merger, and tasks."""
    average, gain, tasks = (row.cost.get(key) for key in (UNSEEN, UNSEEN_GAIN, UNSEEN_TASKS))
    if isinstance(average, float) and isinstance(gain, float):
        return f"{percent(average)} ({100 * gain:+z.1f}, {tasks:.0f})"
    return ABSENT if tasks is None else "none left"


def _recovered_text(row: SummaryRow) -> str:
    """Recovered gap in per cent, with its interval; a dash where it says nothing."""
    if row.recovered_gap is None or row.name == BASE:
        return ABSENT
    limits = row.recovered_gap_interval if row.is_repair else None
    brackets = f" [{100 * limits.low:.0f}, {100 * limits.high:.0f}]" if limits else ""
    return with_unit(row.recovered_gap) + brackets


def _cost(row: SummaryRow, key: str, form: str = "{:.0f}", unit: float = 1) -> str:
    """A cost in a unit, with half of its 95 % interval where it is a time."""
    value = row.cost.get(key, ABSENT)
    if not isinstance(value, int | float):
        return str(value)
    deviation = row.spread.get(key) if "seconds" in key else None
    return _spread(row, form.format(value / unit), deviation and deviation / unit, form.format)


def number(value: float | None) -> str | None:
    """Write a number for a CSV file; None for an empty cell."""
    return None if value is None else f"{value:.6f}"


def with_limits(what: str, value: float | None, limits: Interval | None) -> dict[str, str | None]:
    """Cells of a number and its interval."""
    return {
        what: number(value),
        f"{what}_low": number(limits and limits.low),
        f"{what}_high": number(limits and limits.high),
    }
