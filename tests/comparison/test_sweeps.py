"""Runs of the command: sweeps of comparisons and of the method, and the default grid on texts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from reports import featcal

from fusion_bench_featcal.results import join_folders

pytestmark = pytest.mark.slow

SWEEP = ("-m modelpool=clip-vit-mini_alphabets2 method=compare method.upstreams=[task_arithmetic] "
         "method.post_merging=[featcal] method.samples_per_task=2,4 "
         "method.seed=1,2 method.results_dir=cells")  # fmt: skip
CELLS = 2 + 2 + 4  # references, the merger with two seeds, featcal by samples and seed


def start(folder: Path, *words: str) -> "subprocess.Popen[Any]":
    """Start `fusion_bench` in a folder, with its output in the file `screen`."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fusion_bench.scripts.cli", *words]
    with (folder / "screen").open("ab") as screen:
        pipes: Any = {"stdout": screen, "stderr": screen}
        return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def finish(folder: Path, *words: str) -> None:
    assert start(folder, *words).wait() == 0, (folder / "screen").read_text()[-3000:]


def finished(folder: Path) -> dict[Path, int]:
    """Finished cells, and inodes of their files, which are new in each writing."""
    return {file: file.stat().st_ino for file in folder.glob("cells/[!.]*/run.json")}


def items(folder: Path) -> dict[str, bytes]:
    """Flags of all test items of each cell, whose folder has the digest of its settings."""
    return {file.parent.name: file.read_bytes() for file in folder.glob("cells/*-*/items.npz")}


@pytest.mark.ci
def test_a_killed_sweep_goes_on_and_parallel_jobs_give_equal_bits(tmp_path: Path) -> None:
    serial, parallel = tmp_path / "serial", tmp_path / "parallel"
    process = start(serial, *SWEEP.split())
    while not finished(serial):
        assert process.poll() is None, (serial / "screen").read_text()[-3000:]
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    files = finished(serial)
    assert 0 < len(files) < CELLS
    finish(serial, *SWEEP.split())
    finish(parallel, *SWEEP.split(), "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    after = finished(serial)
    assert files.items() <= after.items() and len(after) == CELLS  # references were made once
    assert items(parallel) == items(serial) and len(items(serial)) == CELLS
    table = featcal("report", serial / "cells").out
    assert all(words in table for words in ("n = 2", "n = 4", "+ featcal", "experts"))


@pytest.mark.ci
def test_each_job_of_a_sweep_has_its_own_run_and_model(tmp_path: Path) -> None:
    finish(tmp_path, "-m", "method=featcal", "modelpool=resnet-mini_TA3", "taskpool=dummy",
           "method.samples_per_task=2,4", "path.log_dir=log",
           'merged_model_save_path="{log_dir}/model"')  # fmt: skip
    assert {path.parent.name for path in tmp_path.glob("log/*/model")} == {"0", "1"}
    runs = [join_folders([tmp_path / "log" / job]).rows for job in "01"]
    sizes = [{row.settings.get("samples_per_task") for row in rows} - {None} for rows in runs]
    assert sizes == [{2}, {4}]


@pytest.mark.parametrize("pool", ["flan-t5-mini_TA6", "llama-mini_TA6"])
def test_no_cell_of_the_default_grid_fails_on_texts(pool: str, tmp_path: Path) -> None:
    few = "samples_per_task=4 steps=2 tasks=2 upstreams=[wudi,lot,featcal_plus]"
    few += " upstream_mergers.wudi.iter_num=2"
    words = [f"method.{word}" for word in f"{few} results_dir=cells".split()]
    finish(tmp_path, "method=compare", f"modelpool={pool}", *words)
    rows = join_folders([tmp_path / "cells"]).rows
    for merger in ("wudi", "lot", "featcal_plus"):
        names = {row.name for row in rows if row.merger == merger}
        assert {"featcal", "featcal_plus", "ridge_surgery", "surgery", "prob_surgery"} <= names
        assert "surgery_v2" not in names
