"""Functions that run in several real processes, joined by gloo, and never wait for ever."""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusion_bench_featcal import TorchProcesses

MINUTE = timedelta(minutes=1)


def in_processes(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Run a function as `in_forks` does, in the processes of a torch process group."""
    with tempfile.TemporaryDirectory() as folder:

        def joined(rank: int) -> Any:
            store = dist.FileStore(f"{folder}/store", size)
            group: Any = {"store": store, "rank": rank, "world_size": size}
            dist.init_process_group("gloo", timeout=MINUTE, **group)
            return work(TorchProcesses(patience=MINUTE))

        return in_forks(size, joined)


def in_forks(size: int, work: Callable[[int], Any], *, seconds: float = 60.0) -> list[Any]:
    """Run a function of the rank in processes: results, exceptions, or negative signals."""
    fork, deadline = multiprocessing.get_context("fork"), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(size)]
        children = [fork.Process(target=_keep, args=(work, *pair)) for pair in enumerate(files)]
        for child in children:
            child.start()
        for child in children:
            child.join(max(deadline - time.monotonic(), 0))
        hanging = [child for child in children if child.is_alive()]
        for child in hanging:
            child.kill()
            child.join()
        assert not hanging, "processes hang"
        return [
            child.exitcode or pickle.loads(file.read_bytes())
            for child, file in zip(children, files, strict=True)
        ]


def _keep(work: Callable[[int], Any], rank: int, file: Path) -> None:
    """Write a function's result or exception to a file."""
    torch.set_num_threads(1)  # OpenMP waits forever for threads, which a fork does not have
    try:
        result = work(rank)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        result = error
    file.write_bytes(pickle.dumps(result))
