import os
from pathlib import Path

import pytest
from synthetic import make_report

from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.results import ReportError, prepare_directory


@pytest.mark.parametrize("below", ["", "run/version_0"])
def test_a_file_in_the_place_of_the_log_directory(tmp_path: Path, below: str):
    place = tmp_path / "logs"
    place.write_text("in the way")
    with pytest.raises(ReportError, match=r"logs.*: (File exists|Not a dir).*path\.log_dir"):
        make_report().write(place / below)
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_the_setting_in_the_message_is_the_callers(tmp_path: Path):
    (tmp_path / "f").write_text("")
    with pytest.raises(ReportError, match="Change --out"):
        prepare_directory(tmp_path / "f", "--out")


def test_an_unwritable_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Permissions do not stop a superuser, so the system call is replaced.
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ReportError, match=r"cannot write .*run: Permission denied.*path\.log_dir"):
        prepare_directory(tmp_path / "run")


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_atomic(tmp_path / "report.json", "old")

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", disk_full)
    with pytest.raises(ReportError, match=r"report\.json: No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_results_are_as_readable_as_the_umask_says(tmp_path: Path):
    plain = tmp_path / "plain"
    plain.write_text("x")
    path = write_atomic(tmp_path / "atomic", b"x")
    assert path.stat().st_mode == plain.stat().st_mode
