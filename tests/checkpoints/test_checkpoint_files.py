"""Checkpoint files are whole or absent."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, run_fast
from process_group import in_forks
from tiny_models import clip_suite

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.files import ReportError, owner_mark, write_atomic, write_whole
from fusion_bench_featcal.tensor_files import read_tensors, write_tensors

TENSORS = {"a": torch.ones(3)}
WRITERS = {
    "bytes": lambda path: write_whole(path, b"new"),
    "result": lambda path: write_atomic(path, "new"),
    "tensors": lambda path: write_tensors(path, TENSORS),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(143)])
def test_file_that_cannot_be_finished_leaves_the_old_one(
    writer: str, error: BaseException, tmp_path: Path, monkeypatch
):
    path = tmp_path / "block-0000.json"
    path.write_bytes(b"old")

    def stop(*_: Any) -> None:
        raise error

    monkeypatch.setattr("os.fsync", stop)
    with pytest.raises((OSError, ReportError, SystemExit)):
        WRITERS[writer](path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"old"


def test_folder_that_cannot_be_made_is_named_before_any_work(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "inner"):
        with pytest.raises(CalibrationError, match=r"taken is a file.*method\.checkpoint_dir"):
            run_fast(clip_suite(tasks=1), checkpoint_dir=str(folder))


def test_what_killed_processes_left_behind_goes_and_other_files_stay(tmp_path: Path):
    (dead,) = in_forks(1, lambda _: os.getpid())
    host = owner_mark().removesuffix(f"-{os.getpid()}")
    gone = [f".block-0000.json.{host}-{dead}-0.part", f".run.json.{host}-{dead}-1.part"]
    alive = f".run.json.{host}-{os.getppid()}-0.part"
    kept = [f".run.json.elsewhere-{dead}-0.part", alive, ".mine.part", "notes.txt"]
    for name in (*gone, *kept):
        (tmp_path / name).write_text("half")
    run_fast(clip_suite(tasks=1), checkpoint_dir=str(tmp_path))
    left = {entry.name for entry in tmp_path.iterdir() if not entry.name.startswith("block-")}
    assert left == {"run.json", *kept}


def test_full_disk_says_how_much_is_needed_and_leaves_usable_blocks(tmp_path: Path, monkeypatch):
    suite, replace, written = clip_suite(tasks=1), os.replace, []
    wanted = run_fast(suite).model

    def full(source: Any, target: Any) -> None:
        if Path(target).name == "block-0001.safetensors":
            raise OSError(28, "No space left on device")
        written.append(replace(source, target))

    monkeypatch.setattr("os.replace", full)
    message = r"0001\.safetensors: No space.*needs .* MB, and .* MB are free.*checkpoint_dir"
    with pytest.raises(CalibrationError, match=message):
        run_fast(suite, checkpoint_dir=str(tmp_path))
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*"))
    resumed = run_fast(suite, checkpoint_dir=str(tmp_path), resume=True)
    assert [record["blocks"] for record in resumed.log.of_kind("resumed")] == [1]
    assert_identical(resumed.model, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_back_as_they_were(dtype: torch.dtype, tmp_path: Path):
    tensors = {"a": torch.randn(3, 4).to(dtype), "t": torch.randn(3, 4).to(dtype).T}
    tensors["tied"] = tensors["a"]
    found = read_tensors(tmp_path / "x", write_tensors(tmp_path / "x", tensors))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert read_tensors(tmp_path / "y", write_tensors(tmp_path / "y", {})) == {}
