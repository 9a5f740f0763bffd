"""Waiting threads on a busy machine."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from fusion_bench_featcal.fusionbench.program import warn_if_busy

ROOT = Path(__file__).parents[1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A machine of two cores, whose use and threads are given, without OpenMP settings."""

    def make(used: list[float], threads: int) -> None:
        for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [0, 1], raising=False)
        monkeypatch.setattr(psutil, "cpu_percent", lambda *args, **kwargs: used)

    return make


NEIGHBOUR = "other processes use 1.2 of 2 cores"


@pytest.mark.parametrize(
    ("used", "threads", "setting", "warning"),
    [
        ([98.0, 20.0], 2, None, NEIGHBOUR),
        ([10.0, 20.0], 2, None, None),
        ([100.0, 100.0], 1, None, None),
        ([0.0, 0.0, 100.0, 100.0], 2, None, None),  # of other cores than ours
        ([100.0, 100.0], 2, "OMP_WAIT_POLICY", None),
        ([100.0, 100.0], 2, "GOMP_SPINCOUNT", None),
    ],
)
def test_neighbour_is_noticed_in_one_line(
    machine, caplog, monkeypatch, used, threads, setting, warning
):
    machine(used, threads)
    if setting is not None:  # whoever has set it is left alone
        monkeypatch.setenv(setting, "active")
    caplog.set_level(logging.WARNING)
    warn_if_busy()
    assert len(caplog.messages) == (warning is not None)
    assert warning is None or warning in caplog.text
    assert warning is None or "set OMP_WAIT_POLICY=passive" in caplog.text


@pytest.mark.parametrize(("own", "wanted"), [(None, "passive"), ("active", "active")])
def test_featcal_and_make_set_it_unless_the_user_did(own, wanted):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {} if own is None else {"OMP_WAIT_POLICY": own}
    code = (
        "import os, sys; from fusion_bench_featcal.cli import main; main(['suite', 'path']); "
        "assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    commands = [[sys.executable, "-c", code]]
    if shutil.which("make"):
        rule = "show: ; @echo $$OMP_WAIT_POLICY"
        commands.append(
            ["make", "--silent", "-f", str(ROOT / "Makefile"), f"--eval={rule}", "show"]
        )
    for command in commands:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == wanted
