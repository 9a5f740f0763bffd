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


def in_processes(
    size: int, work: Callable[[Any], Any], *, seconds: float = 60.0, patience: float | None = None
) -> list[Any]:
    """Run a function as `in_forks` does, in the processes of a torch process group."""
    with tempfile.TemporaryDirectory() as folder:

        def joined(rank: int) -> Any:
            store = dist.FileStore(f"{folder}/store", size)
            longest, waits = timedelta(seconds=seconds), timedelta(seconds=patience or seconds)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=longest
            )
            return work(TorchProcesses(patience=waits))

        return in_forks(size, joined, seconds=seconds)


def in_forks(size: int, work: Callable[[int], Any], *, seconds: float = 60.0) -> list[Any]:
    """Run a function of the rank in several processes, which are killed after some seconds.

    Returns:
        The picklable result of each, by rank, or the exception that it raised, or the number of
        the signal that killed it, as a negative integer.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(size)]
        children = [_start(rank, work, file) for rank, file in enumerate(files)]
        statuses = _wait(children, time.monotonic() + seconds)
        return [
            -os.WTERMSIG(status) if os.WIFSIGNALED(status) else pickle.loads(file.read_bytes())
            for file, status in zip(files, statuses, strict=True)
        ]


def _start(rank: int, work: Callable[[int], Any], file: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        try:
            result = work(rank)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            result = error
        file.write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _wait(children: list[int], deadline: float) -> list[int]:
    statuses: dict[int, int] = {}
    while missing := set(children) - set(statuses):
        for child in missing:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = status
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        assert time.monotonic() < deadline, "processes hang"
        time.sleep(0.01)
    return [statuses[child] for child in children]
