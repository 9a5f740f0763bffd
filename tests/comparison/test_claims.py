"""One process at a time holds the claim of a cell. Claims of dead processes are taken over."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_group import in_forks

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.compare.claims import EXPIRES_SECONDS, Busy, claimed

HERE = socket.gethostname()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "claims" / "wudi--featcal-abc"


def test_one_process_holds_a_claim_and_leaves_nothing(path: Path) -> None:
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


ALIVE = {"pid": os.getpid()}
# What another process left -> the claim is taken over, busy, or refused: its process died twice.
CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "dead": ({}, "taken"),
    "dead, tried twice in this run": ({"run": "mine", "tries": 2}, "refused"),
    "dead, tried twice in another run": ({"tries": 2}, "taken"),
    "a process id given again": (ALIVE | {"age": 60}, "taken"),
    "alive": (ALIVE, "busy"),
    "another host": (ALIVE | {"host": "elsewhere"}, "busy"),
    "another host, long ago": ({"host": "elsewhere", "at": -EXPIRES_SECONDS - 1}, "taken"),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_claims_of_others(case: str, path: Path) -> None:
    words, outcome = CLAIMS[case]
    (dead,) = in_forks(1, lambda _: os.getpid())
    claim = {"host": HERE, "pid": dead, "run": "other", "tries": 1, "age": 0, "at": 0, **words}
    born, then = psutil.Process().create_time() - claim.pop("age"), time.time() + claim.pop("at")
    path.parent.mkdir()
    file = path.with_name(f"{path.name}.001")
    file.write_text(json.dumps(claim | {"born": born}))
    os.utime(file, (then, then))
    if outcome == "busy":
        with pytest.raises(Busy), claimed(path, "mine"):
            pass
        return
    if outcome == "refused":
        words_of_it = rf"died 2 times, .* {HERE} \(process {dead}\)"
        with pytest.raises(CalibrationError, match=words_of_it), claimed(path, "mine"):
            pass
    with claimed(path, "mine"), pytest.raises(Busy), claimed(path, "third"):
        pass
    assert not list(path.parent.iterdir())
