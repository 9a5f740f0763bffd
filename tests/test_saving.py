"""Models are calibrated, saved as a whole in a safe place, and evaluated last."""

import gc
import os
import signal
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fusion_bench import BaseModelPool
from fusion_bench.programs import FabricModelFusionProgram
from image_pools import AVERAGE, suite_pool
from omegaconf import OmegaConf
from process_group import in_forks
from torch import nn
from transformers import CLIPImageProcessor, CLIPVisionModel

from fusion_bench_featcal import CalibrationError, algorithm, files
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.files import clear_leftovers
from fusion_bench_featcal.fusionbench import run_results as results
from fusion_bench_featcal.fusionbench.evaluation import Evaluation
from fusion_bench_featcal.fusionbench.program import prepare_run
from fusion_bench_featcal.fusionbench.saving import check_save_target, save_model
from fusion_bench_featcal.results import ReportError


class Tiny(nn.Module):
    """A model of one tensor, saved as a folder of two files."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1000,), float(value)))

    def save_pretrained(self, path: str, **_: Any) -> None:
        os.makedirs(path)
        torch.save(self.state_dict(), Path(path) / "pytorch_model.bin")
        (Path(path) / "config.json").write_text(str(self.weight[0].item()))


class Pool(BaseModelPool):
    def save_model(  # type: ignore[override]
        self, model: Any, path: str, max_shard_size: str = "5GB", model_dtype: str = ""
    ) -> None:
        (model.to(getattr(torch, model_dtype)) if model_dtype else model).save_pretrained(path)


def pool(**models: Any) -> Any:
    return Pool(models or {"_pretrained_": Tiny(0)})  # type: ignore[arg-type]


def save(value: float, target: Path, **options: Any) -> None:
    save_model(pool(), Tiny(value), target, **options)


def value_at(target: Path) -> float:
    weight = torch.load(target / "pytorch_model.bin")["weight"]
    assert (target / "config.json").read_text() == str(weight[0].item())
    return weight[0].item()


def program_with(path: Any, **options: Any) -> Any:
    return SimpleNamespace(
        merged_model_save_path=str(path), merged_model_save_kwargs=options, log_dir=None
    )


def test_folder_is_replaced_as_a_whole_and_other_files_stay(tmp_path: Path) -> None:
    target, blocks = tmp_path / "log", tmp_path / "log" / "blocks"
    save(1, target)
    (target / "model-00001-of-00002.safetensors").write_text("an older model's")
    blocks.mkdir()
    (blocks / "block-0000.safetensors").write_text("kept")
    with open(target / "run.log", "w") as run_log:
        save(2, target)
        run_log.write("goes on")
    assert value_at(target) == 2
    names = {"pytorch_model.bin", "config.json", "blocks", "run.log"}
    assert {file.name for file in target.iterdir()} == names
    assert (target / "run.log").read_text() == "goes on"
    assert (blocks / "block-0000.safetensors").read_text() == "kept"
    assert [entry.name for entry in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize("moment", range(6))
def test_crash_leaves_the_old_model_or_the_new_one(moment: int, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    save(1, target)
    (target / "notes.txt").write_text("mine")

    def crash(_: int) -> None:
        steps = iter(range(moment))

        def dying(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if next(steps, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        for module, name in ((files, "sync"), (os, "link"), (os, "rename"), (files, "remove")):
            setattr(module, name, dying(getattr(module, name)))
        save(2, target)

    assert in_forks(1, crash) == [-signal.SIGKILL]
    clear_leftovers(target)
    assert value_at(target) in (1, 2)
    assert (target / "notes.txt").read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_full_disk_is_named_and_leaves_the_old_model(tmp_path: Path, monkeypatch) -> None:
    target, usage = tmp_path / "saved", namedtuple("usage", "total used free")
    save(1, target)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CalibrationError, match=r"saved: No space.*4 KiB, and .* free"):
        save(2, target)
    assert value_at(target) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 10, 100))
    with pytest.raises(CalibrationError, match=r"too little room.*0 KiB are free"):
        save(2, tmp_path / "saved")
    with pytest.raises(CalibrationError, match=r"merged_model_save_path.*base's size takes 4 KiB"):
        check_save_target(program_with(tmp_path / "saved"), pool())


HERE, EXPERT = "is the current folder or one above it", r"modelpool\.models\.one"
TARGETS: list[tuple[str, dict[str, Any], str]] = [  # FOLDER has a file and the folder of an expert
    ("", {}, HERE), ("..", {}, HERE),
    ("FOLDER/file", {}, "is a file"),
    ("/proc/nowhere/model", {}, "cannot write"),
    ("FOLDER/expert/a/b", {}, EXPERT), ("FOLDER", {}, EXPERT),
    ("/proc", {}, "is a mount point"),
    ("new", {"max_shard_sise": "1GB"}, r"kwargs.*Pool cannot save with .*max_shard_sise"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "options", "message"), TARGETS)
def test_targets_and_options_are_refused_first(
    path: str, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch
) -> None:
    folder = tmp_path / "folder"
    for name in ("here", "folder/expert"):
        (tmp_path / name).mkdir(parents=True)
    (folder / "file").touch()
    monkeypatch.chdir(tmp_path / "here")
    program = program_with(path.replace("FOLDER", str(folder)), **options)
    models = pool(_pretrained_=Tiny(0), one={"_target_": "x", "path": str(folder / "expert")})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ValueError, ReportError), match=rf"(?s){message}") as caught:
        check_save_target(program, models)
    assert "merged_model_save_" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_links_are_followed_and_models_keep_their_dtype(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "saved").symlink_to(tmp_path / "disk")
    save(1, tmp_path / "saved")
    save(2, tmp_path / "saved")
    assert (tmp_path / "saved").is_symlink() and value_at(tmp_path / "disk") == 2
    model = Tiny(1)
    save_model(pool(), model, tmp_path / "narrow", model_dtype="bfloat16")
    assert model.weight.dtype == torch.float32
    assert torch.load(tmp_path / "narrow" / "pytorch_model.bin")["weight"].dtype == torch.bfloat16


TASKS = ("mini_greek", "mini_latin")
PRESET = {"weak": {"mix_alpha": 0.1}}


class Program(FabricModelFusionProgram):
    """FusionBench's program without its configuration: it saves as the real one does."""

    def __init__(self, folder: Path) -> None:
        self.modelpool = suite_pool()
        self.taskpool: Any = SimpleNamespace(test_dataloaders=dict.fromkeys(TASKS))
        self._modelpool: Any = {}
        self.merged_model_save_path = str(folder / "saved")
        self.merged_model_save_kwargs: Any = None


def models_in_memory() -> int:
    gc.collect()
    models = [x for x in gc.get_objects() if type(x) is CLIPVisionModel]
    return sum(next(model.parameters()).device.type == "cpu" for model in models)


class Events:
    """Events of a run, in order, with the models that are evaluated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.states: dict[str, dict[str, Any]] = {}
        self.in_memory: dict[str, int] = {}
        self.before = models_in_memory()  # that other tests left
        monkeypatch.setattr(results, "evaluate", self.evaluate)
        for owner, name in ((algorithm, "calibrate"), (CLIPVisionModel, "save_pretrained")):
            monkeypatch.setattr(owner, name, self.noted(name, getattr(owner, name)))

    def noted(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            return function(*args, **kwargs)

        return call

    def evaluate(self, taskpool: Any, model: Any, *, name: str, tasks: Any, **_: Any) -> Any:
        self.names.append(name)
        self.states[name] = {key: value.clone() for key, value in model.state_dict().items()}
        self.in_memory[name] = models_in_memory() - self.before
        accuracy: dict[str, float] = {task: 0.5 for task in tasks or TASKS}
        return Evaluation({t: {"accuracy": a} for t, a in accuracy.items()}, accuracy, None)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    return Events(monkeypatch)


def run(folder: Path, **options: Any) -> tuple[Any, Program]:
    options = {"base_method": OmegaConf.create(AVERAGE), "samples_per_task": 4, **options}
    method: Any = FeatCalAlgorithm(**options)
    method._program = program = Program(folder)
    prepare_run(program, None)
    return method.run(program.modelpool), program


def is_saved(state: Any, folder: Path) -> bool:
    saved = CLIPVisionModel.from_pretrained(folder / "saved").state_dict()
    return all(torch.equal(saved[name], value) for name, value in state.items())


def test_calibration_comes_first_then_saving_then_evaluations(
    events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["fusion_bench", "method=featcal", "x={token: hf_secret}"])
    model, program = run(tmp_path, presets=PRESET, compare_with=["base", "experts", "merged"])
    assert events.names == [
        "calibrate", "save_pretrained", "featcal", "calibrate", "featcal:weak",
        "simple_average", "base", *TASKS,
    ]  # fmt: skip
    assert max(events.in_memory.values()) <= 3  # merged, featcal and the preset
    assert max(events.in_memory[name] for name in ("base", *TASKS)) <= 2  # and the returned one
    assert is_saved(model.state_dict(), tmp_path) and is_saved(events.states["featcal"], tmp_path)
    program.save_merged_model(model)
    assert events.names.count("save_pretrained") == 1  # FusionBench's saving has nothing to do
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
    assert events.names.count("save_pretrained") == 1
    evaluated = events.names.index("featcal" if row == "merged" else row)
    assert events.names.index("save_pretrained") < evaluated
    assert is_saved(model.state_dict(), tmp_path)
    assert not is_saved(events.states["featcal"], tmp_path)
    count = len(events.names)
    program.taskpool.evaluate(model)
    assert len(events.names) == count  # the row's evaluation is returned again


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
