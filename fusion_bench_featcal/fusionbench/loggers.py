"""Results of a run for the loggers in `fabric.loggers`: settings, accuracies and drift."""

import logging
import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.results import AVERAGE, FEATCAL, Report
from fusion_bench_featcal.results.curves import CALIBRATION_LOG, MOMENTS, drift_records
from fusion_bench_featcal.results.long_table import is_repair

log = logging.getLogger(__name__)

_UNFIT = re.compile(r"[^\w./ -]")  # MLflow refuses these in names


def log_results(fabric: Any, runs: Iterable[tuple[Report, Path | None]]) -> None:
    """Log results with Fabric's loggers. A logger that fails gives one warning.

    Args:
        fabric: The program's Fabric.
        runs: Reports, each with the folder of its calibration logs, or None without logs.
    """
    settings: dict[str, Any] = {}
    steps: dict[int, dict[str, float]] = {0: {}}
    for report, folder in runs if fabric.loggers else ():
        _collect(report, folder, settings, steps)
    for logger in fabric.loggers:
        try:
            _log(logger, settings, steps)
        except Exception as error:  # from a server, a disk or a library
            name, cause = type(logger).__name__, first_line(error)
            log.warning("fabric.loggers: %s failed (%s). The run's files are whole", name, cause)


def _log(logger: Any, settings: dict[str, Any], steps: dict[int, dict[str, float]]) -> None:
    with suppress(NotImplementedError):  # from CSVLogger
        logger.log_hyperparams(settings)
    with warnings.catch_warnings():
        # CSVLogger warns that it deletes files in its folder. It only deletes its `metrics.csv`.
        warnings.filterwarnings("ignore", message="Experiment logs directory")
        for step, values in sorted(steps.items()):
            logger.log_metrics(values, step=step)
    logger.save()
    logger.finalize("success")


def _collect(
    report: Report, folder: Path | None, settings: dict[str, Any], steps: dict[int, dict[str, Any]]
) -> None:
    """Add a report's settings, its accuracies (step 0) and each block's drift (one step each)."""

    def name(row: str, *words: str) -> str:
        merger = [report.upstream] if report.upstream and is_repair(row, report.upstream) else []
        return _UNFIT.sub("_", "/".join([*merger, row, *words]))

    settings |= {"suite": report.suite, "merger": report.upstream}
    for row, values in report.settings.items():
        settings |= {name(row, key): value for key, value in values.items()}
    for row, accuracies in report.rows.items():
        for task, value in accuracies.items():
            steps[0][name(row, *["accuracy"] * (task != AVERAGE), task)] = float(value)
    for file in sorted(folder.glob(f"{CALIBRATION_LOG}*.jsonl")) if folder else ():
        row = FEATCAL + file.stem.removeprefix(CALIBRATION_LOG).replace(".", "_", 1)
        records = drift_records(file) if row in report.settings else []  # excludes an earlier run's
        blocks = list(dict.fromkeys(record["block"] for record in records))
        for record in records:
            step = steps.setdefault(blocks.index(record["block"]), {})
            for drift in (f"relative_drift_{moment}" for moment in MOMENTS):
                if record.get(drift) is not None:
                    step[name(row, drift, record["task"])] = float(record[drift])
