"""Methods run by themselves leave reports as FeatCal does, but not as parts of other methods."""

from pathlib import Path
from typing import Any

import lightning
import pytest
from cli_runs import fusion_bench
from comparison_parts import MERGERS, FakeProgram, SignTaskPool, model_pool
from lightning.fabric.loggers import CSVLogger

from fusion_bench_featcal.lab.rivals import AnchorOnlyAlgorithm, CorrectedModel
from fusion_bench_featcal.results import Report

BLOCKS = {"name": "replay", "blocks": ["0", "2"]}
KEYS: Any = {"anchor_rho": -2.0, "family": BLOCKS, "base_method": MERGERS["simple_average"]}


def anchor(folder: Path, *, is_run: bool) -> Any:
    """A method with a program, which runs it or another one."""
    algorithm: Any = AnchorOnlyAlgorithm(**KEYS)
    logger = CSVLogger(root_dir=folder, name="logs", version="")
    algorithm.fabric = lightning.Fabric(accelerator="cpu", devices=1, loggers=logger)
    program: Any = FakeProgram(SignTaskPool())
    program.method = algorithm if is_run else None
    algorithm._program = program
    return algorithm


def test_the_improved_model_stands_beside_the_merged_one(tmp_path: Path) -> None:
    method = anchor(tmp_path, is_run=True)
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
    method = anchor(tmp_path, is_run=False)
    method.run(model_pool())
    assert method._program.taskpool.evaluated == 0
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_the_command_merges_corrects_evaluates_and_saves(tmp_path: Path) -> None:
    words = ["method=surgery", "method@method.base_method=simple_average", "method.steps=3"]
    words += ["modelpool=clip-vit-mini_alphabets2", "method.samples_per_task=8"]
    words += ["merged_model_save_path=saved", "path.log_dir=log"]
    fusion_bench(words, cwd=tmp_path)
    report = Report.load(tmp_path / "log")
    assert {"mini_balinese", "mini_korean", "average"} == report.rows["surgery"].keys()
    loaded = CorrectedModel.from_pretrained(tmp_path / "saved")
    assert loaded.samples["mini_korean"] == {"samples": 8, "split": "test"}
    assert "mini_korean" in (tmp_path / "log" / "training_curves.jsonl").read_text()
