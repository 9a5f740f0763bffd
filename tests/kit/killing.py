"""Calibrations in processes that are killed at a chosen moment, and resumed."""

import hashlib
import os
import random
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from process_group import in_forks
from torch import nn

from fusion_bench_featcal.json_files import read_json
from fusion_bench_featcal.output.folder import MANIFEST, OutputFolder

Calibrate = Callable[[Path, bool], Any]
"""Calibrates with an output folder, resuming or not; a `CalibrationResult`."""

WRITING, RENAMING, RENAMED, BETWEEN = (
    "while writing",
    "before renaming",
    "renamed",
    "between blocks",
)
ANYWHERE = "at any time"
MOMENTS = (WRITING, RENAMING, RENAMED, BETWEEN)


def digest_of(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype}".encode() + tensor.double().numpy().tobytes())
    return found.hexdigest()


def finished_blocks(folder: Path) -> int:
    """Number of blocks that a folder lists as finished."""
    path = folder / MANIFEST
    return len(read_json(path, sealed=True)["blocks"]) if path.exists() else 0


def try_kill(
    calibrate: Calibrate, folder: Path, writes: int, blocks: int, seconds: float, seed: int
) -> tuple[str, str]:
    """Kill a run once, or twice, and resume it.

    Args:
        calibrate: The run.
        folder: An empty folder.
        writes: How often a whole run writes a file.
        blocks: Number of blocks.
        seconds: How long a whole run takes.
        seed: Chooses the moments: one in five is any time.

    Returns:
        What happened, and the digest of the model.
    """
    generator = random.Random(seed)
    moment = (*MOMENTS, ANYWHERE)[seed % 5]
    last = (blocks if moment == BETWEEN else writes) - 1
    kills = []
    for attempt in range(1 + generator.randrange(2)):
        count = generator.randrange(last) if attempt == 0 else generator.randrange(2)
        wait = generator.uniform(0.1, 0.9) * seconds
        if killed(calibrate, folder, moment, count, resume=attempt > 0, seconds=wait):
            kills.append(f"{moment} ({finished_blocks(folder)} blocks)")
    digest, restored = _result(lambda: _resumed(calibrate, folder))
    return f"{'; '.join(kills) or 'finished before'} -> {restored} restored", digest


def killed(
    calibrate: Calibrate,
    folder: Path,
    moment: str,
    count: int = 0,
    *,
    resume: bool,
    seconds: float = 0.0,
) -> bool:
    """Run in a process that is killed the `count`-th time that a moment comes.

    Args:
        calibrate: The run.
        folder: Its output folder.
        moment: One of `MOMENTS`, or `ANYWHERE`.
        count: Which of them, from 0.
        resume: Whether it goes on from finished blocks.
        seconds: After which it is killed at any time.

    Returns:
        Whether it was; it may have finished before.
    """

    def run() -> None:
        if moment == ANYWHERE:
            threading.Timer(seconds, _die).start()
        else:
            _die_at(moment, count)
        calibrate(folder, resume)

    return _result(run) == -signal.SIGKILL


def _resumed(calibrate: Calibrate, folder: Path) -> tuple[str, int]:
    """Digest of the model, number of blocks that were restored."""
    result = calibrate(folder, True)
    return digest_of(result.model), sum(r["blocks"] for r in result.log.of_kind("resumed"))


def _result(work: Callable[[], Any]) -> Any:
    (result,) = in_forks(1, lambda _: work())
    if isinstance(result, BaseException):
        raise RuntimeError("the calibration failed in the child process") from result
    return result


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(moment: str, count: int) -> None:
    """Change the functions that write, in this process only, so that one call of them kills it."""
    left = [count]

    def is_turn() -> bool:
        left[0] -= 1
        return left[0] < 0

    sync, replace, write = os.fsync, os.replace, OutputFolder.write

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and is_turn():
            os.ftruncate(descriptor, status.st_size // 2)
            _die()
        sync(descriptor)

    def replaced(source: Any, target: Any) -> None:
        turn = is_turn()
        if turn and moment == RENAMING:
            _die()
        replace(source, target)
        if turn:
            _die()

    def written(self: OutputFolder, block: str, *rest: Any) -> Any:
        tensors = write(self, block, *rest)
        if block not in self._finished and is_turn():
            _die()
        return tensors

    if moment == WRITING:
        os.fsync = fsync
    elif moment == BETWEEN:
        setattr(OutputFolder, "write", written)  # noqa: B010 - a method is not for assigning to
    else:
        os.replace = replaced
