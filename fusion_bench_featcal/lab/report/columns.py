"""Columns of the tables of several runs, and a row's line of their CSV file."""

from typing import Any

from fusion_bench_featcal.results.columns import (
    GAIN,
    RECOVERED,
    WORST_COLUMNS,
    Column,
    cost_cell,
)
from fusion_bench_featcal.results.cost import (
    MODULES_ADDED,
    PARAMETERS_ADDED,
    TASK_ID,
    TOTAL_SECONDS,
)
from fusion_bench_featcal.results.long_table import AVERAGE, NORMALISED
from fusion_bench_featcal.results.summary import SummaryRow
from fusion_bench_featcal.results.tables import ABSENT


def _average(row: SummaryRow) -> str:
    return row.average.text()


def _normalised(row: SummaryRow) -> str:
    if row.normalised is None:
        return ABSENT
    return row.interval(row.normalised, row.spread.get(NORMALISED)).text()


def _added(row: SummaryRow) -> str:
    modules, parameters = (cost_cell(key)(row) for key in (MODULES_ADDED, PARAMETERS_ADDED))
    return ABSENT if modules == ABSENT else f"{modules} / {parameters}"


ACCURACY = [
    Column(AVERAGE, _average),
    Column(
        NORMALISED, _normalised, "normalised: mean over tasks of accuracy / the expert's accuracy"
    ),
    GAIN,
    RECOVERED,
    *WORST_COLUMNS,
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
        "seconds",
        cost_cell("seconds", ".2f"),
        "seconds: of merging for a merger, of the method for others, reading data included, "
        "evaluation not",
    ),
    Column("with merger", cost_cell(TOTAL_SECONDS, ".2f")),
    Column(
        "memory, MiB",
        cost_cell("peak_rss_bytes", unit=2**20),
        "memory: peak resident memory of the process and its children, framework included",
    ),
    Column("GPU memory, MiB", cost_cell("peak_accelerator_bytes", unit=2**20)),
    Column(
        "GPU energy, Wh",
        cost_cell("gpu_energy_wh", ".3g"),
        "GPU energy: drawn by the GPUs in use, as a whole",
    ),
    Column("samples", lambda row: row.samples or ABSENT, "samples: per task, with their split"),
    Column("seeds", lambda row: ", ".join(map(str, row.seeds)) or ABSENT),
]


def csv_line(row: SummaryRow) -> dict[str, Any]:
    """Return all values of a row, one for each key."""
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
