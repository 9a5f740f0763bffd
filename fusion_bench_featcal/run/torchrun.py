"""Processes that torchrun started for one command."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from fusion_bench_featcal.run.processes import Processes

_GRACE_SECONDS = 10.0
"""Longest wait until torchrun ends this process, because another one has failed."""


def is_first_process() -> bool:
    """Return whether this is the first process of torchrun, or was not started by it."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["RANK"] == "0"


def end_after_others() -> NoReturn:
    """End this process without a message.

    It first waits, because torchrun would end the process that prints the message.
    """
    time.sleep(_GRACE_SECONDS)
    raise SystemExit(2)


@contextmanager
def torchrun_processes() -> Iterator["Processes | None"]:
    """Context with the processes that torchrun started, or None if there is only this one.

    The process that fails first raises its error. The errors of others are the same, or follow from
    it, so these processes end without a message.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        yield None
        return
    # Imported here, because torch's import takes seconds.
    import torch.distributed as dist

    from fusion_bench_featcal.run.processes import TorchProcesses

    store, rank, size = next(dist.rendezvous("env://"))
    try:
        dist.init_process_group(store=store, rank=rank, world_size=size)
        processes = TorchProcesses()
        yield processes
        if dist.is_initialized():  # otherwise threads of gloo may abort a process at its end
            processes.leave()
    except BaseException:
        if store.add("failed processes", 1) > 1:
            end_after_others()
        raise
