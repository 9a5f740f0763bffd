"""A run calibrates first, saves what it made, and evaluates last."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fusion_bench.programs import FabricModelFusionProgram
from image_pools import AVERAGE, suite_pool
from omegaconf import OmegaConf
from transformers import CLIPImageProcessor, CLIPVisionModel

from fusion_bench_featcal import algorithm
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench import run_results as results
from fusion_bench_featcal.fusionbench.evaluation import Evaluation
from fusion_bench_featcal.fusionbench.program import prepare_run
from fusion_bench_featcal.results import Report

TASKS = ("mini_greek", "mini_latin")
ALL = ["base", "experts", "merged"]
PRESET = {"weak": {"mix_alpha": 0.1}}


class Program(FabricModelFusionProgram):
    """FusionBench's program without its configuration: it saves as the real one does."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.modelpool = suite_pool()
        self.taskpool = SimpleNamespace(test_dataloaders=dict.fromkeys(TASKS))  # type: ignore[assignment]
        self._modelpool: Any = {}
        self.merged_model_save_path = str(folder / "saved")
        self.merged_model_save_kwargs: Any = options or None


class Events:
    """Events of a run, in order; and how many models were in memory at each evaluation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.held: dict[str, int] = {}
        self._before = _models_in_memory()  # that other tests left
        monkeypatch.setattr(results, "evaluate", self._evaluate)
        calibrate, save = algorithm.calibrate, CLIPVisionModel.save_pretrained
        self._note(monkeypatch, algorithm, "calibrate", calibrate)
        self._note(monkeypatch, CLIPVisionModel, "save_pretrained", save)

    def _note(self, monkeypatch: Any, place: Any, name: str, function: Any) -> None:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(place, name, noted)

    def _evaluate(self, taskpool: Any, model: Any, *, name: str, tasks: Any, **_: Any) -> Any:
        self.seen.append(name)
        self.held[name] = _models_in_memory() - self._before
        accuracy: dict[str, float] = {task: 0.5 for task in tasks or TASKS}
        return Evaluation({t: {"accuracy": a} for t, a in accuracy.items()}, accuracy, None)


def _models_in_memory() -> int:
    gc.collect()
    models = [x for x in gc.get_objects() if type(x) is CLIPVisionModel]
    return sum(next(model.parameters()).device.type == "cpu" for model in models)


def run(folder: Path, *, kwargs: Any = None, **options: Any) -> tuple[Any, Program]:
    options = {
        "base_method": OmegaConf.create(AVERAGE),
        "samples_per_task": 4,
        "compare_with": ALL,
    } | options
    algorithm = FeatCalAlgorithm(**options)
    program = Program(folder, **(kwargs or {}))
    algorithm._program = program  # pyright: ignore[reportAttributeAccessIssue]
    prepare_run(program, None)
    return algorithm.run(program.modelpool), program


def weights_at(folder: Path) -> dict[str, torch.Tensor]:
    return dict(CLIPVisionModel.from_pretrained(folder).state_dict())


def same(model: Any, folder: Path) -> bool:
    saved = weights_at(folder)
    return all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("stream", ["auto", pytest.param(False, marks=pytest.mark.slow)])
def test_calibration_comes_first_then_saving_then_evaluations(
    stream, tmp_path, monkeypatch
) -> None:
    events = Events(monkeypatch)
    report = Report()
    monkeypatch.setattr(results, "Report", lambda **_: report.__init__(**_) or report)
    model, program = run(tmp_path, stream_experts=stream, presets=PRESET)
    assert events.seen == [
        "calibrate", "save_pretrained", "featcal", "calibrate", "featcal:weak",
        "simple_average", "base", *TASKS,
    ]  # fmt: skip
    assert [*report.rows] == ["base", "experts", "simple_average", "featcal", "featcal:weak"]
    assert max(events.held.values()) <= 3  # merged, featcal and the preset
    assert max(events.held[name] for name in ("base", *TASKS)) <= 2  # and what is returned
    assert same(model, tmp_path / "saved")
    program.save_merged_model(model)
    assert events.seen.count("save_pretrained") == 1  # FusionBench's own saving has nothing to do


@pytest.mark.parametrize("row", ["featcal:weak", pytest.param("merged", marks=pytest.mark.slow)])
def test_chosen_row_is_saved_returned_and_reported(row, tmp_path, monkeypatch) -> None:
    events = Events(monkeypatch)
    model, program = run(tmp_path, save=row, presets=PRESET, compare_with=[])
    assert events.seen.count("save_pretrained") == 1
    before = events.seen.index("featcal" if row == "merged" else row)
    assert events.seen.index("save_pretrained") < before
    assert same(model, tmp_path / "saved")
    evaluated = len(events.seen)
    program.taskpool.evaluate(model)  # type: ignore[union-attr]
    assert len(events.seen) == evaluated  # the row's evaluation is given again
    other, _ = run(tmp_path / "other", presets=PRESET, compare_with=[])
    assert not same(other, tmp_path / "saved")


def test_row_that_no_run_makes_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"method\.save must be .*featcal:weak.*'featcal:weak'\)"):
        FeatCalAlgorithm(presets=PRESET, save="featcal:wek")
    with pytest.raises(ValueError, match=r"method\.save must be .*got 'base'"):
        FeatCalAlgorithm(save="base")
    pool = suite_pool()
    pool.load_model = lambda *_: pytest.fail("a model was loaded")
    with pytest.raises(ValueError, match=r"method\.save must be .*got 'featcal:weak'"):
        FeatCalAlgorithm(base_method=AVERAGE, save="featcal:weak").run(pool)


def test_model_is_saved_though_its_evaluation_fails(tmp_path, monkeypatch) -> None:
    Events(monkeypatch)

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "evaluate", fail)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(tmp_path)
    assert weights_at(tmp_path / "saved")
    assert CLIPImageProcessor.from_pretrained(tmp_path / "saved").size  # and its processor


def test_card_tells_how_the_model_was_made(tmp_path, monkeypatch) -> None:
    Events(monkeypatch)
    monkeypatch.setattr("sys.argv", ["fusion_bench", "method=featcal", "x={token: hf_secret}"])
    run(tmp_path)
    card = (tmp_path / "saved" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers")
    for text in (
        "- mini_greek: `4`", "SimpleAverage", "- ridge_lambda: `0.05`", "arxiv.org",
        "fusion_bench method=featcal", "- torch: `", "| **featcal** | 50.0% |",
    ):  # fmt: skip
        assert text in card, text
    assert "hf_secret" not in card


@pytest.mark.slow
def test_card_can_be_left_out_and_never_replaces_a_users_own(tmp_path, monkeypatch) -> None:
    Events(monkeypatch)
    run(tmp_path, kwargs={"model_card": False})
    assert not (tmp_path / "saved" / "README.md").exists()
    (tmp_path / "saved" / "README.md").write_text("mine")
    run(tmp_path)
    assert (tmp_path / "saved" / "README.md").read_text() == "mine"
