"""`featcal calibrate` saves its model completely or not at all, and goes on after a failure."""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from made_folders import llama_folders
from process_group import in_forks
from safetensors.torch import load_file
from test_calibrate_command import words

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.folders import job, saving
from fusion_bench_featcal.json_files import read_lines


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit of the system on the bytes of a file, as a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_one_message_and_resume_goes_on(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    llama_folders(tmp_path)
    paper, out = words(tmp_path, "--preset", "paper", "--no-eval"), tmp_path / "out"
    before = {path.name for path in tmp_path.iterdir()}
    size = (tmp_path / "merged" / "model.safetensors").stat().st_size - 1
    with monkeypatch.context() as patch:  # finished blocks and their log have room
        patch.setattr(saving, "write_weights", largest_file(size)(saving.write_weights))
        assert main(paper) == 2
    *_, line = capsys.readouterr().err.splitlines()  # transformers 5 shows the shards it writes
    assert line.startswith("featcal: error: ")
    for part in (f"the model cannot be saved to --out {out}: ", "File too large", "It needs ",
                 "iB are free", "--resume", f"{out}.blocks"):  # fmt: skip
        assert part in line
    assert {path.name for path in tmp_path.iterdir()} == before | {"out.blocks"}
    assert main([*paper, "--resume"]) == 0
    records = read_lines(out / "featcal" / "calibration_log.jsonl")
    assert [record["blocks"] > 1 for record in records if record["kind"] == "resumed"] == [True]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(arguments: list[str], moment: str, out: Path) -> None:
    """Run the command in a process that is killed when its model has appeared."""

    def run(_: int) -> None:
        sys.argv = ["featcal", *arguments]
        replace = os.replace

        def replaced(source: Any, target: Any) -> None:
            replace(source, target)
            if Path(target) == out:
                die()

        def removed(folder: Any, **_: Any) -> None:
            (Path(folder) / "blocks.json").unlink()
            die()

        if moment == "saved":
            os.replace = replaced
        elif moment == "removing blocks":
            shutil.rmtree = removed
        else:
            setattr(job, "show_scores", die)  # noqa: B010 - a function is not for assigning to
        main(arguments)

    assert in_forks(1, run) == [-signal.SIGKILL]


@pytest.mark.parametrize(
    ("moment", "more"),
    [
        ("saved", []),
        ("removing blocks", ["--resume"]),
        ("showing", ["--resume"]),
    ],
)
def test_a_run_that_was_killed_after_saving_ends_well(
    moment: str, more: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    llama_folders(tmp_path)
    paper, out = words(tmp_path, "--preset", "paper"), tmp_path / "out"
    killed(paper, moment, out)
    saved = load_file(out / "model.safetensors")
    other = [*paper, "--set", "seed=1", "--resume"]
    monkeypatch.setattr(sys, "argv", ["featcal", *other])
    assert main(other) == 2  # a model of another command is no result of this one
    assert f"--out {out} exists and is not empty" in capsys.readouterr().err
    again = [*paper, *more]
    monkeypatch.setattr(sys, "argv", ["featcal", *again])
    assert main(again) == 0
    assert f"saved: {out}" in capsys.readouterr().out
    assert not Path(f"{out}.blocks").exists()
    assert load_file(out / "model.safetensors").keys() == saved.keys()
    assert main(["explain", str(out)]) == 0  # its files are as they were written
    assert main(["report", str(out)]) == 0
    assert (out / "featcal" / "calibration_log.jsonl").is_file()
    assert main(paper) == 2  # another run needs another folder
