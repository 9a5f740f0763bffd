"""Claims of cells: one process holds one, and those of dead processes are taken over."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.compare.claims import EXPIRES_SECONDS, Busy, claimed

HERE = socket.gethostname()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "claims" / "wudi--featcal-abc"


def leave(
    path: Path, *, host: str, pid: int, run: str = "other", tries: int = 1, age: float = 0
) -> Path:
    """A claim that a process has left behind."""
    born = psutil.Process().create_time() - age
    path.parent.mkdir(exist_ok=True)
    file = path.with_name(f"{path.name}.001")
    content = {"host": host, "pid": pid, "born": born, "run": run, "tries": tries}
    file.write_text(json.dumps(content))
    return file


def dead() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_one_holds_a_claim_and_leaves_nothing(path: Path) -> None:
    with claimed(path, "mine"):
        with pytest.raises(Busy), claimed(path, "other"):
            pass
        (file,) = path.parent.iterdir()
        content = json.loads(file.read_text())
        assert (content["host"], content["pid"]) == (HERE, os.getpid())
        assert time.time() - content["time"] < 60
    assert not list(path.parent.iterdir())
    with pytest.raises(KeyboardInterrupt), claimed(path, "mine"):
        raise KeyboardInterrupt
    assert not list(path.parent.iterdir())


def test_a_claim_of_a_dead_process_is_taken_over_at_once(path: Path) -> None:
    leave(path, host=HERE, pid=dead())
    with claimed(path, "mine"), pytest.raises(Busy), claimed(path, "third"):
        pass
    assert not list(path.parent.iterdir())


def test_a_process_id_that_was_given_again_is_not_the_owners(path: Path) -> None:
    leave(path, host=HERE, pid=os.getpid(), age=60)
    with claimed(path, "mine"):
        pass


def test_a_claim_of_another_host_expires(path: Path) -> None:
    file = leave(path, host="elsewhere", pid=os.getpid())
    with pytest.raises(Busy), claimed(path, "mine"):
        pass
    then = time.time() - EXPIRES_SECONDS - 1
    os.utime(file, (then, then))
    with claimed(path, "mine"):
        pass


def test_a_cell_is_tried_twice_in_a_run(path: Path) -> None:
    leave(path, host=HERE, pid=dead(), run="mine")
    with claimed(path, "mine"):
        pass
    leave(path, host=HERE, pid=(pid := dead()), run="mine", tries=2)
    said = rf"died 2 times, .* {HERE} \(process {pid}\)"
    with pytest.raises(CalibrationError, match=said), claimed(path, "mine"):
        pass
    with claimed(path, "mine"):  # when the command is repeated
        pass
    leave(path, host=HERE, pid=dead(), run="mine", tries=2)
    with claimed(path, "another run"):
        pass


def test_without_a_place_for_claims_cells_run(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.touch()
    ran = []
    with claimed(path, "mine"):
        ran.append(1)
    assert ran and "no claim in" in caplog.text
