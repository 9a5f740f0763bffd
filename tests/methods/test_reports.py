"""Methods run by themselves leave reports as FeatCal does, but not as parts of other methods."""

import json
from pathlib import Path
from typing import Any

import lightning
import torch
from comparison_parts import MERGERS, FakeProgram, SignTaskPool, model_pool
from lightning.fabric.loggers import CSVLogger

from fusion_bench_featcal.lab.rivals.method import Method
from fusion_bench_featcal.lab.rivals.standalone import algorithm_of
from fusion_bench_featcal.results import read_run
from fusion_bench_featcal.settings.fields import setting


class Scaled(Method):
    """A method that multiplies every weight."""

    factor: float = setting(1.0, "The factor.")
    name = "scaled"

    @torch.no_grad()
    def post_merge(self, merged: Any, inputs: Any) -> Any:
        for parameter in merged.parameters():
            parameter.mul_(self.factor)
        return merged


def scaled(folder: Path) -> Any:
    """A method, and the program that runs it."""
    algorithm = algorithm_of(Scaled)(factor=-2.0, base_method=MERGERS["simple_average"])
    logger = CSVLogger(root_dir=folder, name="logs", version="")
    algorithm.fabric = lightning.Fabric(accelerator="cpu", devices=1, loggers=logger)
    algorithm._program = FakeProgram(SignTaskPool())
    algorithm._program.method = algorithm
    algorithm._program.report_save_path = str(folder / "program_report.json")
    return algorithm


def test_the_improved_model_stands_beside_the_merged_one(tmp_path: Path) -> None:
    method = scaled(tmp_path)
    taskpool = method._program.taskpool
    method.run(model_pool())
    report = read_run(tmp_path / "logs")
    assert list(report.accuracy) == ["simple_average", "scaled"]
    assert report.merger == "simple_average"
    assert report.row("simple_average").settings == MERGERS["simple_average"]
    assert report.row("scaled").settings["factor"] == -2.0
    assert report.row("scaled").conditions == MERGERS["simple_average"]
    assert isinstance(report.row("scaled").cost["seconds"], float)
    assert any("ends below the merged model" in note.text for note in report.notes)
    # FusionBench evaluates no model again. The report that it would write is there.
    assert taskpool.evaluated == 2 and method._program.taskpool is None
    again = json.loads((tmp_path / "program_report.json").read_text())
    assert again["left"]["accuracy"] == report.accuracy["scaled"]["left"]


def test_a_part_of_another_method_reports_nothing(tmp_path: Path) -> None:
    method = scaled(tmp_path)
    method._program.method = None
    method.run(model_pool())
    assert method._program.taskpool.evaluated == 0
    assert not (tmp_path / "logs").exists()
