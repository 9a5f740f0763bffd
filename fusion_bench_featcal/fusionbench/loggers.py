"""Results of a run for the loggers in `fabric.loggers`: settings, accuracies and drift."""

import logging
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.files.json_files import read_lines
from fusion_bench_featcal.results import AVERAGE, Row, Run
from fusion_bench_featcal.results.run import calibration_log

log = logging.getLogger(__name__)

_UNFIT = re.compile(r"[^\w./ -]")  # MLflow refuses these in names
_DRIFTS = ("relative_drift",)


def log_results(fabric: Any, run: Run, folder: Path | None) -> None:
    """Log results with Fabric's loggers. A logger that fails gives one warning.

    Args:
        fabric: The program's Fabric.
        run: The results.
        folder: The folder of its calibration logs, or None without logs.
    """
    settings: dict[str, Any] = {"suite": run.suite, "merger": run.merger}
    steps: dict[int, dict[str, float]] = {0: {}}
    for row in run.rows if fabric.loggers else ():
        settings |= {_name(row, key): value for key, value in row.settings.items()}
        for task, value in row.accuracy.items():
            steps[0][_name(row, *["accuracy"] * (task != AVERAGE), task)] = value
        if folder is not None and row.is_repair:
            _add_drift(row, folder / calibration_log(row.name), steps)
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


def _name(row: Row, *words: str) -> str:
    return _UNFIT.sub("_", "/".join([row.title, *words]))


def _add_drift(row: Row, file: Path, steps: dict[int, dict[str, float]]) -> None:
    """Add the drift of a calibrated row by task, a step for each block."""
    records = read_lines(file) if file.is_file() else []
    records = [record for record in records if any(key in record for key in _DRIFTS)]
    blocks = list(dict.fromkeys(record["block"] for record in records))
    for record in records:
        step = steps.setdefault(blocks.index(record["block"]), {})
        for key in _DRIFTS:
            if record.get(key) is not None:
                step[_name(row, key, record["task"])] = float(record[key])
