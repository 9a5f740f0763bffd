"""A saved model replaces an older one as a whole; bad places are refused before any work."""

import os
import signal
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fusion_bench import BaseModelPool
from process_group import in_forks
from torch import nn
from transformers import CLIPVisionModel

from fusion_bench_featcal import CalibrationError, files
from fusion_bench_featcal.files import (
    clear_leftovers,
    owner_mark,
    remove_orphans,
    temporary_neighbour,
)
from fusion_bench_featcal.fusionbench.saving import check_save_target, save_model
from fusion_bench_featcal.results import ReportError

Usage = namedtuple("Usage", "total used free")


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
    def save_model(self, model: Any, path: str, max_shard_size: str = "5GB") -> None:  # type: ignore[override]
        model.save_pretrained(path)


def pool(**models: Any) -> Any:
    return Pool(models or {"_pretrained_": Tiny(0)})  # type: ignore[arg-type]


def save(value: float, target: Path, **options: Any) -> None:
    save_model(pool(), Tiny(value), target, **options)


def value_at(target: Path) -> float:
    weight = torch.load(target / "pytorch_model.bin")["weight"]
    assert (target / "config.json").read_text() == str(weight[0].item())
    return weight[0].item()


def test_folder_is_replaced_as_a_whole_and_other_files_stay(tmp_path: Path) -> None:
    target = tmp_path / "log"
    save(1, target)
    (target / "model-00001-of-00002.safetensors").write_text("an older model's")
    (target / "blocks").mkdir()
    (target / "blocks" / "block-0000.safetensors").write_text("kept")
    with open(target / "run.log", "w") as run_log:
        save(2, target)
        run_log.write("goes on")
    assert value_at(target) == 2
    assert {f.name for f in target.iterdir()} == {
        "pytorch_model.bin", "config.json", "blocks", "run.log"
    }  # fmt: skip
    assert (target / "run.log").read_text() == "goes on"
    assert (target / "blocks" / "block-0000.safetensors").read_text() == "kept"
    assert [entry.name for entry in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize("moment", range(6))
def test_crash_leaves_the_old_model_or_the_new_one(moment: int, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    save(1, target)
    (target / "notes.txt").write_text("mine")

    def crash(_: int) -> None:
        left = iter(range(moment))

        def dying(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        for place, name in ((files, "sync"), (os, "link"), (os, "rename"),
                            (files, "remove")):  # fmt: skip
            setattr(place, name, dying(getattr(place, name)))
        save(2, target)

    assert in_forks(1, crash) == [-signal.SIGKILL]
    clear_leftovers(target)
    assert value_at(target) in (1, 2)
    assert (target / "notes.txt").read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(122, "Quota")])
def test_full_disk_names_path_and_room_and_leaves_the_old_model(error, tmp_path, monkeypatch):
    target = tmp_path / "saved"
    save(1, target)

    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CalibrationError, match=r"saved: (No space|Quota).*4 KiB, and .* free"):
        save(2, target)
    assert value_at(target) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_too_little_room_is_noticed_before_writing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(10, 10, 100))
    with pytest.raises(CalibrationError, match=r"too little room.*0 KiB are free"):
        save(2, tmp_path / "saved")
    program = program_with(tmp_path / "saved")
    with pytest.raises(CalibrationError, match=r"merged_model_save_path.*base's size takes 4 KiB"):
        check_save_target(program, pool())


def test_only_what_dead_processes_of_this_host_left_is_removed(tmp_path: Path) -> None:
    (dead,) = in_forks(1, lambda _: os.getpid())
    host = owner_mark().removesuffix(f"-{os.getpid()}")
    mine = temporary_neighbour(tmp_path / "x").name
    kept = {mine, f".x.{host}-{os.getppid()}-0.part", f".x.elsewhere-{dead}-0.part", "x.part"}
    earlier_start = f".x.{host}-{os.getpid()}-a.part"  # of the same container
    gone = {f".x.{host}-{dead}-0.part", f"featcal-{host}-{dead}-ab_c.part", earlier_start}
    for name in kept | gone:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    remove_orphans(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == kept


def program_with(path: Any, **options: Any) -> Any:
    return SimpleNamespace(
        merged_model_save_path=str(path), merged_model_save_kwargs=options, log_dir=None
    )


PLACES = {  # in FOLDER lie a file and the folder of an expert
    "empty": ("", "is the current folder or one above it"),
    "here": (".", "is the current folder or one above it"),
    "above": ("..", "is the current folder or one above it"),
    "file": ("FOLDER/file", "is a file"),
    "below a file": ("FOLDER/file/model", "cannot write .*(File exists|Not a dir)"),
    "read-only": ("/proc/nowhere/model", "cannot write"),
    "expert": ("FOLDER/expert", r"modelpool\.models\.one"),
    "in an expert": ("FOLDER/expert/a/b", r"modelpool\.models\.one"),
    "above an expert": ("FOLDER", r"modelpool\.models\.one"),
    "mount": ("/proc", "is a mount point"),
}


@pytest.mark.parametrize(("path", "message"), PLACES.values(), ids=PLACES)
def test_place_is_refused(path: str, message: str, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "folder"
    for made in (tmp_path / "here", folder / "expert"):
        made.mkdir(parents=True)
    (folder / "file").touch()
    monkeypatch.chdir(tmp_path / "here")
    path = path.replace("FOLDER", str(folder))
    models = pool(_pretrained_=Tiny(0), one={"_target_": "x", "path": str(folder / "expert")})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ValueError, ReportError), match=rf"(?s){message}") as seen:
        check_save_target(program_with(path), models)
    assert "merged_model_save_path" in str(seen.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_pool_that_saves_a_file_may_replace_one(tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_text("old")
    models = BaseModelPool({"_pretrained_": Tiny(0)})  # type: ignore[dict-item]
    check_save_target(program_with(tmp_path / "state.pt"), models)
    save_model(models, Tiny(3), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt")["weight"][0] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_shard_sise": "1GB"}, r"Pool cannot save with .*max_shard_sise"),
        ({"push_to_hub": True, "private": True}, r"Pool cannot save with .*private"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_first(options, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=rf"merged_model_save_kwargs.*{message}"):
        check_save_target(program_with(tmp_path / "saved", **options), pool())


def test_model_that_is_saved_in_another_dtype_is_not_changed(tmp_path: Path) -> None:
    class Converting(Pool):
        def save_model(self, model: Any, path: str, model_dtype: str = "") -> None:  # type: ignore[override]
            model.to(getattr(torch, model_dtype)).save_pretrained(path)

    model = Tiny(1)
    save_model(Converting({}), model, tmp_path / "saved", model_dtype="bfloat16")
    assert model.weight.dtype == torch.float32
    assert torch.load(tmp_path / "saved" / "pytorch_model.bin")["weight"].dtype == torch.bfloat16


def test_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "saved").symlink_to(tmp_path / "disk")
    save(1, tmp_path / "saved")
    save(2, tmp_path / "saved")
    assert (tmp_path / "saved").is_symlink() and value_at(tmp_path / "disk") == 2


def test_real_model_is_saved_over_a_sharded_one(tmp_path: Path) -> None:
    from fusion_bench_featcal.suites import image

    model = CLIPVisionModel.from_pretrained(image.path())
    model.save_pretrained(tmp_path / "saved", max_shard_size="2MB")
    with torch.no_grad():
        next(model.parameters()).add_(1)
    save_model(Pool({}), model, tmp_path / "saved", image.load_processor())
    assert not list((tmp_path / "saved").glob("model-*"))
    loaded = CLIPVisionModel.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(next(loaded.parameters()), next(model.parameters()))
