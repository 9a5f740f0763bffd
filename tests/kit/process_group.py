"""Functions that run in several real processes, joined by gloo, and never wait for ever."""

import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fusion_bench_featcal.processes import TorchProcesses

Work = Callable[[Any], Any]


def in_processes(
    size: int,
    work: Work,
    *,
    seconds: float = 60.0,
    patience: float | None = None,
    join: Callable[..., Any] = TorchProcesses,
) -> list[Any]:
    """Run a function in several processes that are joined by `join`; otherwise as `in_forks`."""
    with tempfile.TemporaryDirectory() as folder:

        def joined(rank: int) -> Any:
            store = dist.FileStore(f"{folder}/store", size)
            waits = timedelta(seconds=patience or seconds)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=waits)
            return work(join(patience=waits))

        return in_forks(size, joined, seconds=seconds)


def in_forks(size: int, work: Callable[[int], Any], *, seconds: float = 60.0) -> list[Any]:
    """Run a function in several processes, given each one's rank.

    Args:
        size: Their number.
        work: What each does; what it returns must be picklable.
        seconds: After which they are killed, and this fails.

    Returns:
        What each returned, by rank; the exception where it raised one; the signal's number, as a
        negative integer, where it was killed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = [_start(rank, work, folder) for rank in range(size)]
        statuses = _wait(children, time.monotonic() + seconds)
        return [_result(folder / str(rank), status) for rank, status in enumerate(statuses)]


def _start(rank: int, work: Callable[[int], Any], folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        try:
            result = work(rank)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            result = error
        (folder / str(rank)).write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _wait(children: list[int], deadline: float) -> list[int]:
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        for child in set(children) - set(statuses):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = status
        if time.monotonic() > deadline:
            for child in set(children) - set(statuses):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise AssertionError(f"{len(children) - len(statuses)} processes hang")
        time.sleep(0.01)
    return [statuses[child] for child in children]


def _result(path: Path, status: int) -> Any:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else pickle.loads(path.read_bytes())
