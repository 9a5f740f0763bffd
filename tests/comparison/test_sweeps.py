"""Studies are Hydra's sweeps of `method=compare`, whose jobs fill one folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from reports import featcal

from fusion_bench_featcal.results import join_folders

COMMAND = [
    sys.executable, "-m", "fusion_bench.scripts.cli", "-m", "method=compare",
    "modelpool=clip-vit-mini_alphabets2", "method.upstreams=[task_arithmetic]", "method.alone=[]",
    "method.post_merging=[featcal]", "method.samples_per_task=2,4", "method.seed=1,2",
]  # fmt: skip
CELLS = 2 + 2 + 4  # references, the merger with two seeds, featcal by samples and seed


def start(folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "screen").open("ab") as screen:
        command = [*COMMAND, "method.results_dir=cells", *words]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=screen, stderr=screen)


def flags(folder: Path) -> dict[tuple[object, ...], bytes]:
    """Flags of all items by row, samples and seed."""
    return {
        (row.name, row.settings.get("samples_per_task"), row.seed): b"".join(
            np.packbits(row.correct[task]).tobytes() for task in sorted(row.correct or {})
        )
        for row in join_folders([folder / "cells"]).rows
        if row.correct
    }


@pytest.mark.slow
@pytest.mark.ci
def test_a_killed_sweep_goes_on_and_parallel_jobs_give_equal_bits(tmp_path: Path) -> None:
    serial, parallel, finished = tmp_path / "serial", tmp_path / "parallel", 0
    files: dict[Path, int] = {}
    for _ in range(2):  # killed twice
        process = start(serial)
        while len(list(serial.glob("cells/[!.]*/run.json"))) <= finished:
            assert process.poll() is None, (serial / "screen").read_text()[-3000:]
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        files = {file: file.stat().st_ino for file in serial.glob("cells/[!.]*/run.json")}
        finished = len(files)
    assert 0 < finished < CELLS
    assert start(serial).wait() == 0, (serial / "screen").read_text()[-3000:]
    after = {file: file.stat().st_ino for file in serial.glob("cells/[!.]*/run.json")}
    assert files.items() <= after.items() and len(after) == CELLS  # references were made once
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert start(parallel, *launcher).wait() == 0, (parallel / "screen").read_text()[-3000:]
    assert flags(parallel) == flags(serial) and len(flags(serial)) == CELLS
    table = featcal("report", serial / "cells").out
    for words in ("n = 2", "n = 4", "+ featcal", "experts"):
        assert words in table
