"""Results of a run for the loggers of `fabric.loggers`: numbers, drift, settings and figures."""

import inspect
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers.logger import DummyLogger
from PIL import Image

from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.scalars import drift_steps, hyperparameters, report_scalars

log = logging.getLogger(__name__)


class SilentLogger(DummyLogger):
    """Takes the place of a logger that failed."""

    def __init__(self, log_dir: str | None) -> None:
        """Keep the run's log directory, which FusionBench asks for."""
        super().__init__()
        self._log_dir = log_dir

    @property
    def log_dir(self) -> str | None:
        """The run's log directory."""
        return self._log_dir


@dataclass
class _Results:
    settings: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    figures: list[Path] = field(default_factory=list)


def log_results(
    fabric: Any,
    runs: Iterable[tuple[Report, Path | None]],
    folder: Path | None,
    draw: Callable[[Path, Path], list[Path]],
) -> None:
    """Hand results to Fabric's loggers, if there are any.

    A logger that fails gives one warning and is replaced by a silent one, because FusionBench uses
    the first logger again: the results are in the run's files already.

    Args:
        fabric: The program's Fabric.
        runs: Reports, each with the folder of its calibration logs (None: there are no files).
        folder: The run's log directory, from whose files figures are drawn (None: no figures).
        draw: Draws the figures of a log directory into another folder and returns their files.
    """
    if not fabric.loggers:
        return
    results = _Results()
    with tempfile.TemporaryDirectory() as drawn:
        try:
            _collect(results, runs)
            if folder is not None:
                paths = draw(folder, Path(drawn))
                results.figures = [path for path in paths if path.suffix == ".png"]
        except Exception as error:
            if isinstance(error.__cause__, ImportError):  # matplotlib is an extra
                log.info("no figures for the loggers: %s", error)
            else:
                _warn("a part of the results", error)
        for place, logger in enumerate(fabric.loggers):
            try:
                _log(logger, results)
            except Exception as error:
                _warn(type(logger).__name__, error)
                fabric.loggers[place] = SilentLogger(None if folder is None else str(folder))


def _warn(what: str, error: Exception) -> None:
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    log.warning(
        "fabric.loggers: %s could not be logged (%s); the run's own files are whole", what, cause
    )


def _collect(results: _Results, runs: Iterable[tuple[Report, Path | None]]) -> None:
    for report, folder in runs:
        results.settings |= hyperparameters(report)
        results.steps.setdefault(0, {}).update(report_scalars(report))
        for step, values in (drift_steps(report, folder) if folder else {}).items():
            results.steps.setdefault(step, {}).update(values)


def _log(logger: Any, results: _Results) -> None:
    with warnings.catch_warnings():
        # CSVLogger warns that it deletes files in its folder. It deletes its `metrics.csv` only.
        warnings.filterwarnings("ignore", message="Experiment logs directory")
        logged = _log_settings(logger, results)
        for step, values in results.steps.items():
            new = {name: values[name] for name in values if step or name not in logged}
            logger.log_metrics(new, step=step)
    logger.save()  # some keep what is logged until there is much of it
    for figure in results.figures:
        _log_figure(logger, figure)
    logger.finalize("success")  # MLflow's runs go on until they are ended


def _log_settings(logger: Any, results: _Results) -> dict[str, float]:
    """Log the hyperparameters; return numbers of step 0 that were logged with them."""
    averages = {}
    try:
        if "metrics" in inspect.signature(logger.log_hyperparams).parameters:
            # TensorBoard shows no hyperparameters without a metric.
            numbers = results.steps.get(0, {})
            averages = {name: numbers[name] for name in numbers if name.endswith("/average")}
            logger.log_hyperparams(results.settings, averages, step=0)
        else:
            logger.log_hyperparams(results.settings)
    except NotImplementedError:  # CSVLogger has no place for them
        return {}
    return averages


def _log_figure(logger: Any, path: Path) -> None:
    """Log an image by the means of the logger's kind, else put it into the logger's folder."""
    experiment = logger.experiment
    if hasattr(logger, "log_image"):  # Weights & Biases
        logger.log_image(key=path.stem, images=[str(path)])
    elif hasattr(experiment, "add_image"):  # TensorBoard
        with Image.open(path) as image:
            experiment.add_image(path.stem, np.asarray(image.convert("RGB")), 0, dataformats="HWC")
    elif hasattr(experiment, "log_artifact"):  # MLflow
        experiment.log_artifact(logger.run_id, str(path), "figures")
    elif folder := getattr(logger, "log_dir", None):
        target = Path(folder) / "figures"
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
