"""Checkpoint files are whole or absent."""

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import run_fast
from tiny_models import clip_suite

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.checkpoints import files


def test_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch):
    path = tmp_path / "block-0000.json"
    files.write_atomic(path, b"old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CalibrationError, match=r"0000\.json: No space.*method\.checkpoint_dir"):
        files.write_atomic(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"old"


def test_folder_that_cannot_be_made_is_named_before_any_work(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "inner"):
        with pytest.raises(CalibrationError, match=r"method\.checkpoint_dir .*taken.* cannot be"):
            run_fast(clip_suite(tasks=1), checkpoint_dir=str(folder))


def test_what_killed_processes_left_behind_goes_and_other_files_stay(tmp_path: Path):
    for name in (".block-0000.json.1.part", ".run.json.77.part", ".mine.part", "notes.txt"):
        (tmp_path / name).write_text("half")
    run_fast(clip_suite(tasks=1), checkpoint_dir=str(tmp_path))
    assert {entry.name for entry in tmp_path.iterdir() if "000" not in entry.name} == {
        "run.json", ".mine.part", "notes.txt"
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_back_as_they_were(dtype: torch.dtype, tmp_path: Path):
    tensors = {"a": torch.randn(3, 4).to(dtype), "t": torch.randn(3, 4).to(dtype).T}
    found = files.read_tensors(tmp_path / "x", files.write_tensors(tmp_path / "x", tensors))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert files.read_tensors(tmp_path / "y", files.write_tensors(tmp_path / "y", {})) == {}
