"""`featcal calibrate` that fails midway has one sentence for it, and loses nothing."""

import json
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killing import finished_blocks, largest_file
from made_folders import words
from reports import featcal

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.errors.signals import end_at_once, interruptions
from fusion_bench_featcal.run.checkpoint import CheckpointFolder

LOG = "out/featcal/calibration_log.jsonl"


def ctrl_c(_: int) -> None:
    raise KeyboardInterrupt


def sigterm(_: int) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def sighup(_: int) -> None:
    os.kill(os.getpid(), signal.SIGHUP)


CODES: dict[Any, int] = {ctrl_c: 130, sigterm: 143, sighup: 129}
INTERRUPTED = r"interrupted: --resume continues from .*/out\.blocks"


# What happens after the first block, given the model's size, and the finished blocks.
FAULTS: dict[str, tuple[Callable[[int], None], int, str]] = {
    "no room for a block": (lambda _: largest_file(1024), 1,
        r"block-0001\.safetensors: it cannot be written: .*needs .*B are free.*--out"),
    "no room for the model": (lambda size: largest_file(size - 1), 2,
        r"the model cannot be saved to --out .*/out: .*File too large.* It needs .*iB are free.*"
        r"--resume: .*/out\.blocks"),
    "Ctrl-C": (ctrl_c, 1, INTERRUPTED),
    "SIGTERM": (sigterm, 1, INTERRUPTED),
    "SIGHUP": (sighup, 1, INTERRUPTED),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence_and_loses_nothing(name, folder: Path, monkeypatch):
    fault, blocks, message = FAULTS[name]
    command = words(folder, "--preset", "paper", "--no-eval", "--set", "modules=[q_proj]")
    model, write = folder / "out" / "model.safetensors", CheckpointFolder.save_block
    assert main([*command, "--out", str(folder / "usual")]) == 0
    before = {path.name for path in folder.iterdir()}

    def write_and_fail(*arguments: Any) -> Any:
        tensors = write(*arguments)
        fault((folder / "merged" / model.name).stat().st_size)
        return tensors

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "save_block", write_and_fail)
        try:
            done = featcal(*command)
        finally:
            largest_file(resource.RLIM_INFINITY)
    assert done.code == CODES.get(fault, 2)
    assert re.search(message, done.err) and len(done.err.splitlines()) == 1, done.err
    assert {path.name for path in folder.iterdir()} == before | {"out.blocks"}
    assert finished_blocks(folder / "out.blocks") == blocks
    assert main([*command, "--resume"]) == 0
    assert model.read_bytes() == (folder / "usual" / model.name).read_bytes()
    log = [*map(json.loads, (folder / LOG).read_text().splitlines())]
    assert [record["blocks"] for record in log if record["kind"] == "resumed"] == [blocks]


def test_processes_that_wait_for_others_are_ended_by_the_system():
    """A collective call of torch lets no Python handler run."""
    before = signal.getsignal(signal.SIGTERM)
    with interruptions():
        assert signal.getsignal(signal.SIGTERM) is not before
        end_at_once()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL == before
