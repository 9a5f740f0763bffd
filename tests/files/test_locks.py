"""Locks of folders, and what a run does on a disk that has no locks."""

import errno
import fcntl
from pathlib import Path
from typing import Any

import pytest

from fusion_bench_featcal.files.locks import locked_folder, locked_target


def without_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("target", [False, True])
def test_a_run_that_cannot_lock_leaves_the_files_of_another_run(target, tmp_path, monkeypatch):
    lock = tmp_path / (".out.lock" if target else ".lock")
    unfinished = tmp_path / ".out.0123abcd.part"

    def locked() -> Any:
        return (
            locked_target(tmp_path / "out", "--out")
            if target
            else locked_folder(tmp_path, "checkpoint_dir", "out")
        )

    for file in (lock, unfinished):
        file.write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", without_locks)
        with locked():
            pass
    assert lock.exists() and unfinished.exists()
    with locked():  # both were left by a killed run
        pass
    assert not lock.exists() and not unfinished.exists()


def test_a_run_that_cannot_lock_says_so_and_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(fcntl, "flock", without_locks)
    with locked_target(tmp_path / "out", "--out"):
        pass
    assert (
        "out cannot be locked" in caplog.text and "do not start a second run with it" in caplog.text
    )
    assert not [*tmp_path.iterdir()]
