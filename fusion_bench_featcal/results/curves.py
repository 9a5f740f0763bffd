"""Training curves and drift, which a run's figures need in addition to its report."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, write_atomic
from fusion_bench_featcal.json_files import json_lines, read_lines

from .long_table import FEATCAL
from .schema import NUMBER, check_types

# The log of `featcal` has this stem. The log of `featcal_<preset>` adds `.<preset>`.
CALIBRATION_LOG = "calibration_log"
CURVES_FILE = "training_curves.jsonl"
MOMENTS = ("before", "after")
_DRIFTS = [f"{kind}_{moment}" for kind in ("drift", "relative_drift") for moment in MOMENTS]
_DRIFT = {"task": str, "block": str, **dict.fromkeys(_DRIFTS, NUMBER | None)}
_HELD_OUT = {
    "task": str,
    "block": str,
    "held_out_drift": NUMBER,
    "held_out_drift_merged": NUMBER,
}
_CURVE = {"!": ("name", "task", "losses"), "name": str, "task": str}

Curves = dict[str, list[tuple[int, float]]]
"""Task -> steps done and loss, in order. Step 0 is before training."""


def as_curves(content: Any, label: str) -> Curves:
    """Check curves read from JSON: task -> list of `[step, loss]`.

    Raises:
        ReportError: If they have another form, steps do not rise, or a loss is not finite.
    """
    try:
        curves = {
            str(task): [(int(step), float(loss)) for step, loss in points]
            for task, points in content.items()
        }
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ReportError(f"{label}: a curve is a list of [step, loss]: {error}") from error
    for task, points in curves.items():
        steps = [step for step, _ in points]
        finite = all(math.isfinite(loss) for _, loss in points)
        if not points or steps != sorted(set(steps)) or not finite:
            raise ReportError(f"{label}: task '{task}': steps must rise and losses be finite")
    return curves


def write_curves(
    directory: str | Path, curves: Mapping[str, Curves], setting: str = LOG_DIR_SETTING
) -> Path | None:
    """Write the curves of a run's rows into an existing folder, replacing an earlier file.

    Returns the file, or None if no row has curves.
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
    return write_atomic(path, json_lines(records), setting)


def load_curves(directory: str | Path) -> dict[str, Curves]:
    """Read the file of `write_curves`: row -> its curves, none if there is no file."""
    path = Path(directory) / CURVES_FILE
    curves: dict[str, Curves] = {}
    for number, record in enumerate(read_lines(path) if path.exists() else (), start=1):
        label = f"{path}, line {number}"
        check_types(record, _CURVE, label)
        part = as_curves({record["task"]: record["losses"]}, label)
        curves.setdefault(record["name"], {}).update(part)
    return curves


def calibration_logs(run: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield each calibrated row of a run, with its records of drift and of held-out drift."""
    for log in sorted(run.glob(f"{CALIBRATION_LOG}*.jsonl")):
        row = FEATCAL + log.stem.removeprefix(CALIBRATION_LOG).replace(".", "_", 1)
        yield row, drift_records(log), held_out_records(log)


def held_out_records(path: str | Path) -> list[dict[str, Any]]:
    """Read the records with drift on held-out samples from a calibration log."""
    records = []
    for number, record in enumerate(read_lines(Path(path)), start=1):
        if "held_out_drift" in record:
            check_types(record, {"!": tuple(_HELD_OUT), **_HELD_OUT}, f"{path}, line {number}")
            records.append(record)
    return records


def drift_records(path: str | Path) -> list[dict[str, Any]]:
    """Read the records with drift from a calibration log."""
    records = []
    for number, record in enumerate(read_lines(Path(path)), start=1):
        drifts = any(record.get(f"drift_{moment}") is None for moment in MOMENTS)
        needed = () if drifts else ("task", "block")
        check_types(record, {"!": needed, **_DRIFT}, f"{path}, line {number}")
        if needed:
            records.append(record)
    return records
