"""Calibrations in processes that are killed at a chosen moment, and resumed."""

import hashlib
import os
import random
import signal
import stat
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fusion_bench_featcal.checkpoints.store import Checkpoints

Calibrate = Callable[[Path, bool], Any]
"""Calibrates with a checkpoint folder, resuming or not; a `CalibrationResult`."""

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


def killed(
    calibrate: Calibrate,
    folder: Path,
    moment: str,
    count: int = 0,
    *,
    resume: bool,
    seconds: float = 0.0,
) -> str:
    """Run in a process that kills itself the `count`-th time that a moment comes.

    Args:
        calibrate: The run.
        folder: Its checkpoints.
        moment: One of `MOMENTS`, or `ANYWHERE`: then it is killed from outside.
        count: Which of them, from 0.
        resume: Whether it goes on from checkpoints.
        seconds: When it is killed from outside.

    Returns:
        What it was doing when it was killed; empty if it finished before.
    """

    def run(tell: Callable[[str], None]) -> None:
        if moment != ANYWHERE:
            _die_at(moment, count, tell)
        calibrate(folder, resume)

    told, died = _forked(run, seconds if moment == ANYWHERE else None)
    if not died or moment != ANYWHERE:
        return told
    return f"{ANYWHERE} ({seconds:.2f} s, {len(list(folder.glob('block-*.json')))} blocks)"


def resumed(calibrate: Calibrate, folder: Path) -> tuple[str, int]:
    """Resume in a process of its own: digest of the model, number of blocks that were restored."""

    def run(tell: Callable[[str], None]) -> None:
        result = calibrate(folder, True)
        restored = [record["blocks"] for record in result.log.of_kind("resumed")]
        tell(f"{digest_of(result.model)} {sum(restored)}")

    told, _ = _forked(run, None)
    digest, restored = told.split()
    return digest, int(restored)


def try_kill(
    calibrate: Calibrate, folder: Path, writes: int, blocks: int, seconds: float, seed: int
) -> tuple[str, str]:
    """Kill a run once, or twice, and resume it.

    Args:
        calibrate: The run.
        folder: An empty folder.
        writes: Number of files that a whole run writes.
        blocks: Number of blocks.
        seconds: How long a whole run takes.
        seed: Chooses the moments: one in five is any time, from outside.

    Returns:
        What happened, and the digest of the model.
    """
    generator = random.Random(seed)
    told = ""
    for attempt in range(1 + generator.randrange(2)):
        moment = ANYWHERE if seed % 5 == 4 else MOMENTS[seed % 5]
        last = (blocks if moment == BETWEEN else writes) - 1
        count = generator.randrange(last) if attempt == 0 else generator.randrange(2)
        wait = generator.uniform(0.1, 0.9) * seconds
        what = killed(calibrate, folder, moment, count, resume=attempt > 0, seconds=wait)
        told = "; ".join(filter(None, (told, what)))
    digest, restored = resumed(calibrate, folder)
    return f"{told or 'finished before'} -> {restored} restored", digest


def _forked(run: Callable[[Callable[[str], None]], Any], seconds: float | None) -> tuple[str, bool]:
    """What a child process told before it ended, and whether it was killed."""
    reading, writing = os.pipe()

    def tell(text: str) -> None:
        os.write(writing, text.encode())

    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(tell)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(
            child, signal.SIGKILL
        )  # a child that has ended is still there until it is waited for
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise RuntimeError("the calibration failed in the child process, see its traceback")
    return told, os.WIFSIGNALED(status)


def _die_at(moment: str, count: int, tell: Callable[[str], None]) -> None:
    """Change the functions that write, in this process only, so that one call of them kills it."""
    left = [count]

    def die(what: object) -> None:
        tell(f"{moment} {what}")
        os.kill(os.getpid(), signal.SIGKILL)

    def is_turn() -> bool:
        left[0] -= 1
        return left[0] < 0

    sync, replace, keep = os.fsync, os.replace, Checkpoints.keep

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and is_turn():
            os.ftruncate(descriptor, status.st_size // 2)
            die(f"({status.st_size // 2} of {status.st_size} bytes were there)")
        sync(descriptor)

    def replaced(source: Any, target: Any) -> None:
        turn = is_turn()
        if turn and moment == RENAMING:
            die(Path(target).name)
        replace(source, target)
        if turn:
            die(Path(target).name)

    def kept(self: Checkpoints, block: str, *rest: Any) -> None:
        keep(self, block, *rest)
        if is_turn():
            die(f"after {block}")

    if moment == WRITING:
        os.fsync = fsync
    elif moment == BETWEEN:
        setattr(Checkpoints, "keep", kept)  # noqa: B010 - a method is not for assigning to
    else:
        os.replace = replaced
