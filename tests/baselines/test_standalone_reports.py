"""Baselines run by themselves leave reports as FeatCal does, but not as parts of other methods."""

from pathlib import Path
from typing import Any

import lightning
import pytest
from cli_runs import fusion_bench
from comparison_parts import MERGERS, FakeProgram, SignTaskPool, model_pool
from lightning.fabric.loggers import CSVLogger
from torch import nn

from fusion_bench_featcal.baselines.settings import RidgeSurgerySettings
from fusion_bench_featcal.comparison import FeatureCorrection
from fusion_bench_featcal.fusionbench import run_results as results
from fusion_bench_featcal.fusionbench.standalone import Row, run_merging, run_post_merging
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.curves import load_curves

DRAWN = {"left": {"samples": 3, "split": "train"}, "right": {"samples": 3, "split": "test"}}
ROW = Row(name="doubled", settings={"factor": 2}, seed=7, samples=lambda model: DRAWN)


class Algorithm:
    """What `run_merging` and `run_post_merging` ask of a method that the program runs."""

    base_method = MERGERS["simple_average"]

    def __init__(self, folder: Path, *, is_run: bool = True) -> None:
        logger = CSVLogger(root_dir=folder, name="logs", version="")
        self.fabric = lightning.Fabric(accelerator="cpu", devices=1, loggers=logger)
        self.log_dir = logger.log_dir
        self._program: Any = FakeProgram(SignTaskPool())
        self._program.method = self if is_run else None


def doubled(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data.mul_(2)
    model.curves = {"left": [(0, 2.0), (20, 1.0)]}  # type: ignore[assignment]
    return model


def test_improved_model_stands_beside_the_merged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results.atexit, "register", lambda _: None)  # prints when all is over
    algorithm = Algorithm(tmp_path)
    taskpool = algorithm._program.taskpool
    model = run_post_merging(algorithm, model_pool(), ROW, doubled)
    report = Report.load(tmp_path / "logs")
    assert list(report.rows) == ["simple_average", "doubled"]
    assert report.upstream == "simple_average"
    assert report.settings == {
        "simple_average": MERGERS["simple_average"],
        "doubled": {"factor": 2},
    }
    assert report.seeds == {"doubled": 7}
    assert report.samples == {"doubled": DRAWN}
    assert isinstance(report.cost["doubled"]["seconds"], float)
    assert report.notes == [
        "doubled was made with samples of the test split",
        "left ends below the merged model: doubled -15.0 points",
        "right ends below the merged model: doubled -45.0 points",
    ]
    assert (tmp_path / "logs" / "metrics.csv").is_file()
    assert load_curves(tmp_path / "logs") == {"doubled": {"left": [(0, 2.0), (20, 1.0)]}}
    assert taskpool.evaluated == 2
    assert (
        algorithm._program.taskpool.evaluate(model)["left"]["accuracy"]
        == (report.rows["doubled"]["left"])
    )
    assert taskpool.evaluated == 2  # the evaluation is given again, not made again


def test_merger_is_a_row_of_its_own(tmp_path: Path) -> None:
    run_merging(
        Algorithm(tmp_path), model_pool(), ROW, lambda: doubled(model_pool().load_model("left"))
    )
    report = Report.load(tmp_path / "logs")
    assert list(report.rows) == ["doubled"] and report.upstream == "doubled"


@pytest.mark.parametrize("post_merging", [True, False])
def test_part_of_another_method_reports_nothing(tmp_path: Path, post_merging: bool) -> None:
    algorithm = Algorithm(tmp_path, is_run=False)
    if post_merging:
        run_post_merging(algorithm, model_pool(), ROW, doubled)
    else:
        run_merging(algorithm, model_pool(), ROW, lambda: doubled(nn.Linear(1, 1)))
    assert algorithm._program.taskpool.evaluated == 0
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_command_leaves_a_report_that_fits_a_comparisons(tmp_path: Path) -> None:
    fusion_bench(
        [
            "method=ridge_surgery",
            "modelpool=clip-vit-mini_alphabets2",
            "method.samples_per_task=8",
            f"path.log_dir={tmp_path}/log",
        ],
        tmp_path,
    )
    report = Report.load(tmp_path / "log")
    assert list(report.rows) == ["task_arithmetic", "ridge_surgery"]
    assert report.rows["ridge_surgery"]["average"] > report.rows["task_arithmetic"]["average"]
    values = {"samples_per_task": 8, "stream": RidgeSurgerySettings().stream}
    cell = FeatureCorrection(method="ridge_surgery", **values)
    assert report.settings["ridge_surgery"] == cell.settings
    assert report.samples["ridge_surgery"]["mini_korean"]["samples"] == 8
    assert report.items.keys() == report.rows.keys()


def test_model_is_saved_before_it_is_evaluated(tmp_path: Path, monkeypatch) -> None:
    class Folder(nn.Module):
        def save_pretrained(self, path: str) -> None:
            Path(path).mkdir()

    def evaluated(*_: Any, **__: Any) -> None:
        assert "- factor: `2`" in (tmp_path / "saved" / "README.md").read_text()
        raise RuntimeError("the evaluation failed")

    algorithm, pool = Algorithm(tmp_path), model_pool()
    algorithm._program.merged_model_save_path = str(tmp_path / "saved")
    monkeypatch.setattr(results, "evaluate", evaluated)
    monkeypatch.setattr(pool, "save_model", lambda model, path: model.save_pretrained(path))
    with pytest.raises(RuntimeError, match="the evaluation failed"):
        run_merging(algorithm, pool, ROW, Folder)
    assert (tmp_path / "saved" / "README.md").is_file()
