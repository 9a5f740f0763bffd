"""Threads that process items ahead of their use."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")

_MAX_WORKERS = 8  # more threads wait for Python's lock and each other's memory


def automatic_workers() -> int:
    """Return a number of threads for this machine: one per core up to 8, none on a single core."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return 0 if cores == 1 else min(cores, _MAX_WORKERS)


def in_order(
    read: Callable[[Key], Item],
    process: Callable[[Item], Result],
    keys: Iterable[Key],
    *,
    workers: int,
    ahead: int,
) -> Generator[Result, None, None]:
    """Yield `process(read(key))` for each key, in the order of the keys.

    `read` runs in the caller's thread, because data sets need not allow others, and `process` in
    worker threads. An error of `process` is raised in place of its result, one of `read` at once.
    Closing the iterator cancels work that has not begun and waits for the rest.

    Args:
        read: Returns the item of a key.
        process: Returns the result of an item.
        keys: The keys.
        workers: Number of threads; 0: everything runs in the caller's thread.
        ahead: Number of results that may wait for the caller, >= 1.
    """
    if workers == 0:
        yield from (process(read(key)) for key in keys)
        return
    pending: deque[Future[Result]] = deque()
    executor = ThreadPoolExecutor(workers, thread_name_prefix="featcal-images")
    try:
        for key in keys:
            pending.append(executor.submit(process, read(key)))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
