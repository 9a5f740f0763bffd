"""Fabric's loggers get settings, accuracies and drift by block. One may fail."""

import csv
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger

from fusion_bench_featcal import CalibrationLog
from fusion_bench_featcal.fusionbench import log_results
from fusion_bench_featcal.results import Report

ROW = "task_arithmetic/featcal_plus"


class Failing(CSVLogger):
    """A logger whose server is gone."""

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        raise ConnectionError("no route to host")


def test_loggers_get_accuracies_settings_and_one_step_of_drift_per_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    report, records = Report(suite="toy", upstream="task_arithmetic"), CalibrationLog()
    report.add_row("task_arithmetic", {"a": 0.5, "b": 0.6}, settings={"scaling_factor": 0.3})
    report.add_row("featcal:plus", {"a": 0.7, "b": 0.8}, settings={"ridge_lambda": 0.05})
    report.write(tmp_path)
    for block, size in (("first", 1.0), ("second", 2.0)):
        for task, scale in (("a", 1.0), ("b", 3.0)):
            drift = {"drift_before": size * scale, "drift_after": size}
            drift |= {f"relative_{name}": value for name, value in drift.items()}
            records.add("task", {"block": block, "task": task, **drift})
    for preset in ("plus", "earlier"):  # of an earlier run
        records.write(tmp_path / f"calibration_log.{preset}.jsonl")
    loggers = [kind(root_dir=tmp_path, name=kind.__name__, version="")
               for kind in (Failing, CSVLogger, TensorBoardLogger)]  # fmt: skip
    log_results(SimpleNamespace(loggers=loggers), [(report, tmp_path)])

    message = "fabric.loggers: Failing failed (no route to host). The run's files are whole"
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.WARNING, message)]
    with open(tmp_path / "CSVLogger" / "metrics.csv", newline="") as file:
        first, second = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    sizes = {"before/a": 1.0, "before/b": 3.0, "after/a": 1.0, "after/b": 1.0}
    drift = {f"{ROW}/relative_drift_{name}": size for name, size in sizes.items()}
    accuracies = {f"task_arithmetic/{name}": value for name, value in (
        ("accuracy/a", 0.5), ("accuracy/b", 0.6), ("average", 0.55), ("featcal_plus/average", 0.75),
        ("featcal_plus/accuracy/a", 0.7), ("featcal_plus/accuracy/b", 0.8))}  # fmt: skip
    assert first == pytest.approx({"step": 0} | accuracies | drift)
    assert second == pytest.approx({"step": 1} | {name: 2 * value for name, value in drift.items()})
    events = reader.EventAccumulator(str(tmp_path / "TensorBoardLogger")).Reload()
    plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"ridge_lambda" in plugin and b"scaling_factor" in plugin
