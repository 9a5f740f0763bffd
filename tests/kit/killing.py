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

WRITING, RENAMING, RENAMED = "while writing", "before renaming", "renamed"
BETWEEN, ANYWHERE = "between blocks", "at any time"
MOMENTS = (WRITING, RENAMING, RENAMED, BETWEEN, ANYWHERE)


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype}".encode() + tensor.double().numpy().tobytes())
    return digest.hexdigest()


def finished_blocks(folder: Path) -> int:
    """Number of blocks that a folder lists as finished."""
    path = folder / MANIFEST
    return len(read_json(path, sealed=True)["blocks"]) if path.exists() else 0


def try_kill(
    calibrate: Calibrate, folder: Path, writes: int, blocks: int, seconds: float, seed: int
) -> tuple[str, str]:
    """Kill a run once or twice and resume it. Returns a report and the digest of the model.

    Args:
        calibrate: The run.
        folder: An empty folder.
        writes: Number of files that a whole run writes.
        blocks: Number of blocks.
        seconds: Duration of a whole run.
        seed: Chooses the moments: one in five is any time.
    """
    generator, moment, kills = random.Random(seed), MOMENTS[seed % 5], []
    last = (blocks if moment == BETWEEN else writes) - 1
    for attempt in range(1 + generator.randrange(2)):
        count = generator.randrange(2 if attempt else last)
        wait = generator.uniform(0.1, 0.9) * seconds

        def work(count: int = count, wait: float = wait, resume: bool = attempt > 0) -> None:
            _die_at(moment, count, wait)
            calibrate(folder, resume)

        if _result(work) == -signal.SIGKILL:
            kills.append(f"{moment} ({finished_blocks(folder)} blocks)")

    def resumed() -> tuple[str, int]:
        result = calibrate(folder, True)
        return digest_of(result.model), sum(r["blocks"] for r in result.log.of_kind("resumed"))

    digest, restored = _result(resumed)
    return f"{'; '.join(kills) or 'finished before'} -> {restored} restored", digest


def _result(work: Callable[[], Any]) -> Any:
    (result,) = in_forks(1, lambda _: work())
    if isinstance(result, BaseException):
        raise RuntimeError("the calibration failed in the child process") from result
    return result


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(moment: str, count: int, seconds: float) -> None:
    """Change functions that write, in this process only: call number `count` of one kills it."""
    sync, replace, write, calls = os.fsync, os.replace, OutputFolder.write, [0]

    def is_turn() -> bool:
        calls[0] += 1
        return calls[0] > count

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

    if moment == ANYWHERE:
        threading.Timer(seconds, _die).start()
    elif moment == WRITING:
        os.fsync = fsync
    elif moment == BETWEEN:
        setattr(OutputFolder, "write", written)  # noqa: B010 - a method is not for assigning to
    else:
        os.replace = replaced
