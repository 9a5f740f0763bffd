"""Baselines run by themselves leave reports as FeatCal does, but not as parts of other methods."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import pytest
from comparison_parts import MERGERS, FakeProgram, SignTaskPool, model_pool
from lightning.fabric.loggers import CSVLogger
from torch import nn

from fusion_bench_featcal.fusionbench import run_results as results
from fusion_bench_featcal.lab.rivals.registry import Method
from fusion_bench_featcal.lab.rivals.standalone import algorithm_of
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.curves import load_curves
from fusion_bench_featcal.setting_fields import setting

DRAWN = {"left": {"samples": 3, "split": "train"}, "right": {"samples": 3, "split": "test"}}


@dataclass(frozen=True, kw_only=True, eq=False)
class Doubling(Method):
    name = "doubled"
    factor: float = setting(2, "Factor of all parameters.")
    seed: int = setting(7, "Seed.", ge=0)

    def post_merge(self, merged: nn.Module, inputs: Any) -> nn.Module:
        for parameter in merged.parameters():
            parameter.data.mul_(self.factor)
        merged.curves = {"left": [(0, 2.0), (20, 1.0)]}  # type: ignore[assignment]
        return merged

    def samples(self, model: Any, tasks: Any) -> dict[str, Any]:
        return DRAWN


class DoublingMerger(Doubling):
    def merge(self, inputs: Any) -> nn.Module:
        return self.post_merge(inputs.modelpool.load_model("left"), inputs)


Improving, Merging = algorithm_of(Doubling), algorithm_of(DoublingMerger)


def algorithm(kind: type, folder: Path, *, is_run: bool = True, **keys: Any) -> Any:
    """A method with a program, which runs it or another one."""
    made: Any = kind(**keys)
    logger = CSVLogger(root_dir=folder, name="logs", version="")
    made.fabric = lightning.Fabric(accelerator="cpu", devices=1, loggers=logger)
    program: Any = FakeProgram(SignTaskPool())
    program.method = made if is_run else None
    made._program = program
    return made


IMPROVING = {"base_method": MERGERS["simple_average"]}


def test_improved_model_stands_beside_the_merged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = algorithm(Improving, tmp_path, **IMPROVING)
    taskpool = method._program.taskpool
    model = method.run(model_pool())
    report = Report.load(tmp_path / "logs")
    assert list(report.rows) == ["simple_average", "doubled"]
    assert report.upstream == "simple_average"
    assert report.settings == {
        "simple_average": MERGERS["simple_average"],
        "doubled": {"factor": 2, "seed": 7},
    }
    assert report.seeds == {"doubled": 7}
    assert report.samples == {"doubled": DRAWN}
    assert isinstance(report.cost["doubled"]["seconds"], float)
    assert [note.text for note in report.notes] == [
        "doubled was made with samples of the test split",
        "left ends below the merged model: doubled -15.0 points",
        "right ends below the merged model: doubled -45.0 points",
    ]
    assert (tmp_path / "logs" / "metrics.csv").is_file()
    assert load_curves(tmp_path / "logs") == {"doubled": {"left": [(0, 2.0), (20, 1.0)]}}
    assert taskpool.evaluated == 2
    again = method._program.taskpool.evaluate(model)
    assert again["left"]["accuracy"] == report.rows["doubled"]["left"]
    assert taskpool.evaluated == 2  # the evaluation is given again, not made again


def test_merger_is_a_row_of_its_own(tmp_path: Path) -> None:
    algorithm(Merging, tmp_path).run(model_pool())
    report = Report.load(tmp_path / "logs")
    assert list(report.rows) == ["doubled"] and report.upstream == "doubled"


@pytest.mark.parametrize(("kind", "keys"), [(Improving, IMPROVING), (Merging, {})])
def test_part_of_another_method_reports_nothing(tmp_path: Path, kind: type, keys: Any) -> None:
    method = algorithm(kind, tmp_path, is_run=False, **keys)
    method.run(model_pool())
    assert method._program.taskpool.evaluated == 0
    assert not (tmp_path / "logs").exists()


def test_model_is_saved_before_it_is_evaluated(tmp_path: Path, monkeypatch) -> None:
    def evaluated(*_: Any, **__: Any) -> None:
        assert "- factor: `2`" in (tmp_path / "saved" / "README.md").read_text()
        raise RuntimeError("the evaluation failed")

    method, pool = algorithm(Merging, tmp_path), model_pool()
    method._program.merged_model_save_path = str(tmp_path / "saved")
    monkeypatch.setattr(results, "evaluate", evaluated)
    monkeypatch.setattr(pool, "save_model", lambda model, path: Path(path).mkdir())
    with pytest.raises(RuntimeError, match="the evaluation failed"):
        method.run(pool)
    assert (tmp_path / "saved" / "README.md").is_file()
