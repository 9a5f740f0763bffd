"""Fabric's loggers get settings, accuracies and drift by block. One may fail."""

import csv
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.loggers import CSVLogger

from fusion_bench_featcal import CalibrationLog
from fusion_bench_featcal.fusionbench import log_results
from fusion_bench_featcal.results import Run


class Noting(CSVLogger):
    """A logger that takes settings, whose server is gone."""

    def log_hyperparams(self, params: Any) -> None:
        self.settings = params

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        raise ConnectionError("no route to host")


def test_loggers_get_accuracies_settings_and_drift_and_one_may_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run, records = Run(suite="toy", merger="task_arithmetic"), CalibrationLog()
    run.add_row("task_arithmetic", {"accuracy": {"a": 0.5}})
    plus = {"accuracy": {"a": 0.75}}
    run.add_row("featcal_plus", plus, settings={"ridge_lambda": 0.05})
    for block, drift in (("first", 1.0), ("second", 2.0)):
        drifts = {"drift": 9.0, "relative_drift": drift}
        records.add("task", {"block": block, "task": "a", **drifts})
    for preset in ("plus", "earlier"):  # of an earlier run
        records.write(tmp_path / f"calibration_log.{preset}.jsonl")
    failing = Noting(tmp_path, name="", version="Noting")
    by_line = CSVLogger(tmp_path, name="", version="CSVLogger")
    log_results(SimpleNamespace(loggers=[failing, by_line]), run, tmp_path)

    message = "fabric.loggers: Noting failed (no route to host). The run's files are whole"
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.WARNING, message)]
    row = "task_arithmetic/featcal_plus"
    assert failing.settings[f"{row}/ridge_lambda"] == 0.05
    with open(tmp_path / "CSVLogger" / "metrics.csv", newline="") as file:
        first, second = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    accuracies = {"task_arithmetic/accuracy/a": 0.5, f"{row}/accuracy/a": 0.75}
    accuracies |= {"task_arithmetic/average": 0.5, f"{row}/average": 0.75}
    assert first == {"step": 0, f"{row}/relative_drift/a": 1.0} | accuracies
    assert second == {"step": 1, f"{row}/relative_drift/a": 2.0}
