"""Methods run by themselves leave reports as FeatCal does, but not as parts of other methods."""

from pathlib import Path
from typing import Any

import lightning
from comparison_parts import MERGERS, FakeProgram, SignTaskPool, model_pool
from lightning.fabric.loggers import CSVLogger

from fusion_bench_featcal.lab.rivals import AnchorOnlyAlgorithm
from fusion_bench_featcal.results import Report

BLOCKS = {"name": "replay", "blocks": ["0", "2"]}
KEYS: Any = {"anchor_rho": -2.0, "family": BLOCKS, "base_method": MERGERS["simple_average"]}


def anchor(folder: Path) -> Any:
    """A method, and the program that runs it."""
    algorithm: Any = AnchorOnlyAlgorithm(**KEYS)
    logger = CSVLogger(root_dir=folder, name="logs", version="")
    algorithm.fabric = lightning.Fabric(accelerator="cpu", devices=1, loggers=logger)
    algorithm._program = FakeProgram(SignTaskPool())
    algorithm._program.method = algorithm
    return algorithm


def test_the_improved_model_stands_beside_the_merged_one(tmp_path: Path) -> None:
    method = anchor(tmp_path)
    taskpool = method._program.taskpool
    model = method.run(model_pool())
    report = Report.load(tmp_path / "logs")
    assert list(report.rows) == ["simple_average", "anchor_only"]
    assert report.upstream == "simple_average"
    assert report.settings["simple_average"] == MERGERS["simple_average"]
    assert report.settings["anchor_only"]["anchor_rho"] == -2.0
    assert isinstance(report.cost["anchor_only"]["seconds"], float)
    assert any("ends below the merged model" in note.text for note in report.notes)
    assert (tmp_path / "logs" / "metrics.csv").is_file()
    again = method._program.taskpool.evaluate(model)
    assert again["left"]["accuracy"] == report.rows["anchor_only"]["left"]
    assert taskpool.evaluated == 2  # the stored evaluation is returned


def test_a_part_of_another_method_reports_nothing(tmp_path: Path) -> None:
    method = anchor(tmp_path)
    method._program.method = None
    method.run(model_pool())
    assert method._program.taskpool.evaluated == 0
    assert not (tmp_path / "logs").exists()
