"""Fabric's loggers get settings, accuracies and drift by block."""

import csv
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger

from fusion_bench_featcal.fusionbench.loggers import log_results
from fusion_bench_featcal.log import CalibrationLog
from fusion_bench_featcal.results import Report

ROW = "task_arithmetic/featcal_plus"
Run = tuple[Report, Path]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of two tasks and two blocks, and its files beside those of an earlier run."""
    report, folder = Report(suite="toy", upstream="task_arithmetic"), tmp_path / "run"
    settings = {"ridge_lambda": 0.05, "modules": None}
    report.add_row("task_arithmetic", {"a": 0.5, "b": 0.6}, settings={"scaling_factor": 0.3})
    report.add_row("featcal:plus", {"a": 0.7, "b": 0.8}, settings=settings)
    report.write(folder)
    records = CalibrationLog()
    for block, size in (("first", 1.0), ("second", 2.0)):
        for task, scale in (("a", 1.0), ("b", 3.0)):
            drift = {"drift_before": size * scale, "drift_after": size * scale / 2}
            relative = {f"relative_{name}": value / 10 for name, value in drift.items()}
            records.add("task", {"block": block, "task": task, **drift, **relative})
    for preset in ("plus", "earlier"):
        records.write(folder / f"calibration_log.{preset}.jsonl")
    return report, folder


def logged(folder: Path, report: Report, files: Path | None) -> list[dict[str, float]]:
    """Numbers of each step in a CSV logger's file."""
    logger = CSVLogger(root_dir=folder, name="logs", version="")
    log_results(SimpleNamespace(loggers=[logger]), [(report, files)])
    with open(folder / "logs" / "metrics.csv", newline="") as file:
        return [{k: float(v) for k, v in line.items() if v} for line in csv.DictReader(file)]


def test_csv_has_accuracies_and_one_step_of_drift_per_block(run: Run, tmp_path: Path, caplog):
    before, after = (f"{ROW}/relative_drift_{moment}" for moment in ("before", "after"))
    accuracies = {
        "task_arithmetic/accuracy/a": 0.5, "task_arithmetic/accuracy/b": 0.6,
        "task_arithmetic/average": 0.55,
        f"{ROW}/accuracy/a": 0.7, f"{ROW}/accuracy/b": 0.8, f"{ROW}/average": 0.75,
    }  # fmt: skip
    drift = {f"{before}/a": 0.1, f"{before}/b": 0.3, f"{after}/a": 0.05, f"{after}/b": 0.15}
    first, second = logged(tmp_path, *run)
    assert first == pytest.approx({"step": 0} | accuracies | drift)
    assert second == pytest.approx({"step": 1} | {name: 2 * value for name, value in drift.items()})
    (line,) = logged(tmp_path / "other", run[0], None)  # without files
    assert line == pytest.approx({"step": 0} | accuracies)
    assert not caplog.records


def test_tensorboard_has_settings_and_numbers(run: Run, tmp_path: Path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(root_dir=tmp_path, name="logs", version="")
    log_results(SimpleNamespace(loggers=[logger]), [run])
    events = reader.EventAccumulator(str(tmp_path / "logs")).Reload()
    drift = events.Scalars(f"{ROW}/relative_drift_after/a")
    assert [(event.step, pytest.approx(event.value)) for event in drift] == [(0, 0.05), (1, 0.1)]
    plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"ridge_lambda" in plugin and b"scaling_factor" in plugin


class Failing(CSVLogger):
    """A logger whose server is gone."""

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        raise ConnectionError("no route to host")


def test_failing_logger_gives_one_warning_and_the_next_one_its_numbers(run, tmp_path, caplog):
    other = CSVLogger(root_dir=tmp_path, name="logs", version="")
    failing = Failing(root_dir=tmp_path, name="other")
    log_results(SimpleNamespace(loggers=[failing, other]), [run])
    message = "fabric.loggers: Failing failed (no route to host). The run's files are whole"
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.WARNING, message)]
    assert (tmp_path / "logs" / "metrics.csv").is_file()
