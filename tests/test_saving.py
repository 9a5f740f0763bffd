"""Models are saved as a whole, in a safe place."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fusion_bench import BaseModelPool
from process_group import in_forks
from torch import nn

from fusion_bench_featcal import CalibrationError, files
from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.files import clear_leftovers
from fusion_bench_featcal.fusionbench import save_model
from fusion_bench_featcal.fusionbench.saving import check_save_target


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
        model = Tiny(2)
        save_model(pool(), model, target, model_dtype="bfloat16")
        run_log.write("goes on")
    assert value_at(target) == 2 and model.weight.dtype == torch.float32
    assert torch.load(target / "pytorch_model.bin")["weight"].dtype == torch.bfloat16
    names = {"pytorch_model.bin", "config.json", "blocks", "run.log"}
    assert {file.name for file in target.iterdir()} == names
    assert (target / "run.log").read_text() == "goes on"
    assert (blocks / "block-0000.safetensors").read_text() == "kept"
    assert [entry.name for entry in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize("moment", range(6))
def test_crash_leaves_the_old_model_or_the_new_one(
    moment: int, tmp_path: Path, monkeypatch
) -> None:
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
    monkeypatch.setattr(files, "STALE", -1)  # seconds
    clear_leftovers(target)
    assert value_at(target) in (1, 2)
    assert (target / "notes.txt").read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_full_disk_is_named_and_leaves_the_old_model(tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "saved"
    save(1, target)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CalibrationError, match=r"saved: No space.*4 KiB, and .* free"):
        save(2, target)
    assert value_at(target) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(CalibrationError, match=r"merged_model_save_path.*base's size takes 4 KiB"):
        check_save_target(program_with(target), pool())


TARGETS: list[tuple[str, dict[str, Any], str]] = [  # FOLDER has a file and the folder of an expert
    ("..", {}, "is the current folder or one above it"),
    ("FOLDER/file", {}, "is a file"),
    ("FOLDER", {}, r"modelpool\.models\.one"),
    ("new", {"max_shard_sise": "1GB"}, r"kwargs.*Pool cannot save with .*max_shard_sise"),
]


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
