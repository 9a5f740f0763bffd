"""Every kind of Fabric logger gets numbers, drift by block, settings and figures."""

import csv
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from PIL import Image

from fusion_bench_featcal.fusionbench import loggers
from fusion_bench_featcal.fusionbench.loggers import log_results
from fusion_bench_featcal.log import CalibrationLog
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.figures import plot_run
from fusion_bench_featcal.results.scalars import drift_steps, hyperparameters

ROW = "task_arithmetic/featcal_plus"


@pytest.fixture
def run(tmp_path: Path) -> tuple[Report, Path]:
    """A run of two tasks and two blocks, and its files."""
    report = Report(suite="toy", upstream="task_arithmetic")
    settings = {"ridge_lambda": 0.05, "stages": [1, 2], "modules": None}
    report.add_row("task_arithmetic", {"a": 0.5, "b": 0.6}, settings={"scaling_factor": 0.3})
    report.add_row("featcal:plus", {"a": 0.7, "b": 0.8}, settings=settings)
    report.write(tmp_path / "run")
    kept = CalibrationLog()
    for block, size in (("first", 1.0), ("second", 2.0)):
        for task, scale in (("a", 1.0), ("b", 3.0)):
            drift = {"drift_before": size * scale, "drift_after": size * scale / 2}
            relative = {f"relative_{name}": value / 10 for name, value in drift.items()}
            kept.add("task", {"block": block, "task": task, **drift, **relative})
    kept.write(tmp_path / "run" / "calibration_log.plus.jsonl")
    return report, tmp_path / "run"


def picture(run: Path, folder: Path) -> list[Path]:
    """A figure of 3 x 2 pixels, in two formats."""
    Image.new("RGB", (3, 2), "red").save(folder / "drift.png")
    (folder / "drift.svg").write_text("<svg/>")
    return [folder / "drift.png", folder / "drift.svg"]


def hand(logger: Any, run: tuple[Report, Path], draw: Any = picture) -> None:
    log_results(SimpleNamespace(loggers=[logger]), [run], run[1], draw)


def test_drift_is_one_step_for_each_block(run):
    steps = drift_steps(*run)
    assert list(steps) == [0, 1]
    before, after = (f"{ROW}/relative_drift_{moment}" for moment in ("before", "after"))
    assert set(steps[1]) == {f"{n}/{t}" for n in (before, after) for t in ("a", "b", "average")}
    assert steps[0][f"{before}/b"] == pytest.approx(0.3)
    assert steps[1][f"{after}/average"] == pytest.approx(0.2)


def test_drift_without_the_features_norms_is_absolute(run):
    report, folder = run
    kept = CalibrationLog()
    kept.add("task", {"block": "0", "task": "a", "drift_before": 2.0, "drift_after": 1.0})
    kept.add("task", {"block": "1", "task": "a", "drift_before": None, "drift_after": None})
    kept.write(folder / "calibration_log.plus.jsonl")
    steps = drift_steps(report, folder)
    assert list(steps) == [0]
    assert steps[0][f"{ROW}/drift_after/a"] == 1.0


def test_logs_of_an_earlier_run_are_left_out(run):
    report, folder = run
    (folder / "calibration_log.plus.jsonl").rename(folder / "calibration_log.earlier.jsonl")
    assert drift_steps(report, folder) == {}


def test_hyperparameters_name_their_row(run):
    assert hyperparameters(run[0]) == {
        "suite": "toy",
        "merger": "task_arithmetic",
        "task_arithmetic/scaling_factor": 0.3,
        f"{ROW}/ridge_lambda": 0.05,
        f"{ROW}/stages": [1, 2],
        f"{ROW}/modules": None,
    }


def test_csv_gets_numbers_drift_and_figures(run, tmp_path, caplog):
    hand(CSVLogger(root_dir=tmp_path, name="logs", version=""), run)
    with open(tmp_path / "logs" / "metrics.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["step"], second["step"]) == ("0", "1")
    assert float(first[f"{ROW}/average"]) == pytest.approx(0.75)
    assert float(second[f"{ROW}/relative_drift_before/b"]) == pytest.approx(0.6)
    assert second[f"{ROW}/average"] == ""
    figures = tmp_path / "logs" / "figures"
    assert [path.name for path in figures.iterdir()] == ["drift.png"]
    assert not caplog.records


def test_tensorboard_gets_all_of_it(run, tmp_path):
    # It still converts with a function that newer protobufs warn of.
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(root_dir=tmp_path, name="logs", version="", default_hp_metric=False)
    hand(logger, run)
    events = reader.EventAccumulator(str(tmp_path / "logs")).Reload()
    drift = events.Scalars(f"{ROW}/relative_drift_after/a")
    assert [(event.step, pytest.approx(event.value)) for event in drift] == [(0, 0.05), (1, 0.1)]
    (average,) = events.Scalars(f"{ROW}/average")
    assert average.value == pytest.approx(0.75)
    (image,) = events.Images("drift")
    assert (image.width, image.height) == (3, 2)
    plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"ridge_lambda" in plugin and b"scaling_factor" in plugin


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # its own
@pytest.mark.parametrize("store", ["sqlite", "folder"])
def test_mlflow_gets_all_of_it(store, run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    from lightning.pytorch.loggers import MLFlowLogger

    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts of a sqlite store
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    address = {"sqlite": f"sqlite:///{tmp_path}/mlflow.db", "folder": f"file:{tmp_path}/store"}
    logger = MLFlowLogger(experiment_name="toy", tracking_uri=address[store])
    hand(logger, run)
    client = mlflow.MlflowClient(address[store])
    kept = client.get_run(logger.run_id)
    assert kept.info.status == "FINISHED"
    assert kept.data.params[f"{ROW}/ridge_lambda"] == "0.05"
    assert kept.data.metrics[f"{ROW}/average"] == pytest.approx(0.75)
    history = client.get_metric_history(logger.run_id, f"{ROW}/relative_drift_before/average")
    assert {event.step: pytest.approx(event.value) for event in history} == {0: 0.2, 1: 0.4}
    (figure,) = client.list_artifacts(logger.run_id, "figures")
    assert figure.path == "figures/drift.png"


class Failing(CSVLogger):
    """A logger whose server is gone."""

    def log_metrics(self, metrics, step=None):
        raise ConnectionError("no route\nto host")


def test_a_failing_logger_gives_one_warning_and_the_next_one_its_numbers(run, tmp_path, caplog):
    kept = CSVLogger(root_dir=tmp_path, name="logs", version="")
    fabric = SimpleNamespace(loggers=[Failing(root_dir=tmp_path, name="other"), kept])
    log_results(fabric, [run], run[1], picture)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "fabric.loggers: Failing could not be logged (ConnectionError: no route to host); the "
        "run's own files are whole"
    )
    assert (tmp_path / "logs" / "metrics.csv").is_file()
    silent, same = fabric.loggers
    assert same is kept
    assert silent.log_dir == str(run[1])  # FusionBench asks for it once more
    silent.log_metrics({"a": 1.0}, step=0)
    silent.log_hyperparams({"a": 1.0})


def test_figures_that_cannot_be_drawn_cost_no_numbers(run, tmp_path, caplog):
    def fail(run: Path, folder: Path) -> list[Path]:
        raise ValueError("no font")

    hand(CSVLogger(root_dir=tmp_path, name="logs", version=""), run, fail)
    (record,) = caplog.records
    assert "a part of the results could not be logged (ValueError: no font)" in record.getMessage()
    assert (tmp_path / "logs" / "metrics.csv").is_file()
    assert not (tmp_path / "logs" / "figures").exists()


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_run_without_evaluation_is_logged_without_a_warning(blocks, tmp_path, caplog):
    report = Report(suite="toy", upstream="task_arithmetic", settings={"featcal": {"seed": 1}})
    report.write(tmp_path / "run")
    drift = {"drift_before": 1.0, "drift_after": 0.5}
    records = [{"kind": "block", "block": "first", "seconds": 0.1}]
    records += [{"kind": "task", "block": "first", "task": "a", **drift}] * blocks
    CalibrationLog("clip", records).write(tmp_path / "run" / "calibration_log.jsonl")
    logger = CSVLogger(root_dir=tmp_path, name="logs", version="")
    hand(logger, (report, tmp_path / "run"), plot_run)
    assert not caplog.records
    names = [path.name for path in (tmp_path / "logs").rglob("*.png")]
    assert names == ["drift.png"] * blocks


def test_without_matplotlib_there_are_no_figures_and_no_warning(run, tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    hand(CSVLogger(root_dir=tmp_path, name="logs", version=""), run, plot_run)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (tmp_path / "logs" / "metrics.csv").is_file()


def test_without_loggers_nothing_is_drawn(run, monkeypatch):
    monkeypatch.setattr(loggers, "_collect", None)
    log_results(SimpleNamespace(loggers=[]), [run], run[1], lambda *_: pytest.fail("drawn"))


def test_without_files_there_are_the_numbers_of_the_report(run, tmp_path):
    logger = CSVLogger(root_dir=tmp_path, name="logs", version="")
    fabric = SimpleNamespace(loggers=[logger])
    log_results(fabric, [(run[0], None)], None, lambda *_: pytest.fail("drawn"))
    with open(tmp_path / "logs" / "metrics.csv", newline="") as file:
        (line,) = csv.DictReader(file)
    assert float(line[f"{ROW}/average"]) == pytest.approx(0.75)


def test_documentation_names_what_is_logged():
    page = Path(__file__).resolve().parents[1] / "docs" / "comparison.md"
    names = re.findall(r"`relative_drift_(\w+)", page.read_text(encoding="utf-8"))
    assert {"before", "after"} <= set(names)
