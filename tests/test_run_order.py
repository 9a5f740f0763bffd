"""A run calibrates first, saves its model, and evaluates last."""

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

TASKS = ("mini_greek", "mini_latin")
PRESET = {"weak": {"mix_alpha": 0.1}}


class Program(FabricModelFusionProgram):
    """FusionBench's program without its configuration: it saves as the real one does."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.modelpool = suite_pool()
        self.taskpool: Any = SimpleNamespace(test_dataloaders=dict.fromkeys(TASKS))
        self._modelpool: Any = {}
        self.merged_model_save_path = str(folder / "saved")
        self.merged_model_save_kwargs: Any = options or None


def models_in_memory() -> int:
    gc.collect()
    models = [x for x in gc.get_objects() if type(x) is CLIPVisionModel]
    return sum(next(model.parameters()).device.type == "cpu" for model in models)


class Events:
    """Events of a run, in order; and how many models were in memory at each evaluation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.held: dict[str, int] = {}
        self.before = models_in_memory()  # that other tests left
        monkeypatch.setattr(results, "evaluate", self.evaluate)
        for owner, name in ((algorithm, "calibrate"), (CLIPVisionModel, "save_pretrained")):
            monkeypatch.setattr(owner, name, self.noted(name, getattr(owner, name)))

    def noted(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            return function(*args, **kwargs)

        return call

    def evaluate(self, taskpool: Any, model: Any, *, name: str, tasks: Any, **_: Any) -> Any:
        self.seen.append(name)
        self.held[name] = models_in_memory() - self.before
        accuracy: dict[str, float] = {task: 0.5 for task in tasks or TASKS}
        return Evaluation({t: {"accuracy": a} for t, a in accuracy.items()}, accuracy, None)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    return Events(monkeypatch)


def run(folder: Path, *, kwargs: Any = None, **options: Any) -> tuple[Any, Program]:
    options = {"base_method": OmegaConf.create(AVERAGE), "samples_per_task": 4, **options}
    method: Any = FeatCalAlgorithm(**options)
    method._program = program = Program(folder, **(kwargs or {}))
    prepare_run(program, None)
    return method.run(program.modelpool), program


def is_saved(model: Any, folder: Path) -> bool:
    saved = CLIPVisionModel.from_pretrained(folder / "saved").state_dict()
    return all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("stream", ["auto", pytest.param(False, marks=pytest.mark.slow)])
def test_calibration_comes_first_then_saving_then_evaluations(
    stream: Any, events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["fusion_bench", "method=featcal", "x={token: hf_secret}"])
    every = ["base", "experts", "merged"]
    model, program = run(tmp_path, stream_experts=stream, presets=PRESET, compare_with=every)
    assert events.seen == [
        "calibrate", "save_pretrained", "featcal", "calibrate", "featcal:weak",
        "simple_average", "base", *TASKS,
    ]  # fmt: skip
    assert max(events.held.values()) <= 3  # merged, featcal and the preset
    assert max(events.held[name] for name in ("base", *TASKS)) <= 2  # and the returned one
    assert is_saved(model, tmp_path)
    program.save_merged_model(model)
    assert events.seen.count("save_pretrained") == 1  # FusionBench's own saving has nothing to do
    card = (tmp_path / "saved" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers")
    for text in (
        "- mini_greek: `4`", "SimpleAverage", "- ridge_lambda: `0.05`", "arxiv.org",
        "fusion_bench method=featcal", "- torch: `", "| **featcal** | 50.0% |",
    ):  # fmt: skip
        assert text in card, text
    assert "hf_secret" not in card


@pytest.mark.parametrize("row", ["featcal:weak", pytest.param("merged", marks=pytest.mark.slow)])
def test_chosen_row_is_saved_and_returned(row: str, events: Events, tmp_path: Path) -> None:
    model, program = run(tmp_path, save=row, presets=PRESET, compare_with=[])
    assert events.seen.count("save_pretrained") == 1
    evaluated = events.seen.index("featcal" if row == "merged" else row)
    assert events.seen.index("save_pretrained") < evaluated
    assert is_saved(model, tmp_path)
    count = len(events.seen)
    program.taskpool.evaluate(model)
    assert len(events.seen) == count  # the row's evaluation is given again
    other, _ = run(tmp_path / "other", presets=PRESET, compare_with=[])
    assert not is_saved(other, tmp_path)


def test_model_is_saved_though_its_evaluation_fails(
    events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "evaluate", fail)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(tmp_path)
    assert CLIPVisionModel.from_pretrained(tmp_path / "saved")
    assert CLIPImageProcessor.from_pretrained(tmp_path / "saved").size  # and its processor


@pytest.mark.slow
def test_card_can_be_left_out_and_never_replaces_a_users(events: Events, tmp_path: Path) -> None:
    run(tmp_path, kwargs={"model_card": False})
    assert not (tmp_path / "saved" / "README.md").exists()
    (tmp_path / "saved" / "README.md").write_text("mine")
    run(tmp_path)
    assert (tmp_path / "saved" / "README.md").read_text() == "mine"
