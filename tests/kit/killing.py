"""Calibrations in processes that are killed at a chosen moment, and resumed."""

import hashlib
import itertools
import os
import random
import signal
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from process_group import in_forks
from torch import nn

Calibrate = Callable[[Path, bool], Any]
"""Calibrates with an output folder, resuming or not; a `CalibrationResult`."""

WRITING, RENAMING, RENAMED = "while writing", "before renaming", "renamed"
ANYWHERE = "at any time"
MOMENTS = (WRITING, RENAMING, RENAMED, ANYWHERE)


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype}".encode() + tensor.double().numpy().tobytes())
    return digest.hexdigest()


def finished_blocks(folder: Path) -> int:
    """Number of finished blocks in a folder."""
    return len(list(folder.glob("block-*.safetensors")))


def try_kill(
    calibrate: Calibrate, folder: Path, writes: int, seconds: float, seed: int
) -> tuple[str, str]:
    """Kill a run of so many files and seconds, resume it, and return a report and its digest."""
    generator, moment, kills = random.Random(seed), MOMENTS[seed % len(MOMENTS)], []
    for attempt in range(1 + generator.randrange(2)):
        count = generator.randrange(2 if attempt else writes - 1)
        wait = generator.uniform(0.1, 0.9) * seconds

        def work(_: int, count: int = count, wait: float = wait, resume: bool = attempt > 0):
            _die_at(moment, count, wait)
            calibrate(folder, resume)

        (status,) = in_forks(1, work)
        assert status in (None, -signal.SIGKILL), status
        if status:
            kills.append(f"{moment} ({finished_blocks(folder)} blocks)")
    result = calibrate(folder, True)
    restored = sum(record["blocks"] for record in result.log.of_kind("resumed"))
    report = f"{'; '.join(kills) or 'finished before'} -> {restored} restored"
    return report, digest_of(result.model)


def _die_at(moment: str, count: int, seconds: float) -> None:
    """Change functions that write, in this process only: call number `count` of one kills it."""
    sync, replace, calls = os.fsync, os.replace, itertools.count()
    die = partial(os.kill, os.getpid(), signal.SIGKILL)

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if moment == WRITING and stat.S_ISREG(status.st_mode) and next(calls) == count:
            os.ftruncate(descriptor, status.st_size // 2)
            die()
        sync(descriptor)

    def replaced(source: Any, target: Any) -> None:
        turn = moment != WRITING and next(calls) == count
        if not turn or moment == RENAMED:
            replace(source, target)
        if turn:
            die()

    if moment == ANYWHERE:
        timer = threading.Timer(seconds, die)
        timer.daemon = True  # a process that ended before is not waited for
        timer.start()
    else:
        os.fsync, os.replace = fsync, replaced
