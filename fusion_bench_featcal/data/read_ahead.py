"""Work on items in threads, a few items ahead, with results in the items' order."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST_WORKERS = 8  # more threads wait for Python's lock and each other's memory


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def automatic_workers() -> int:
    """Threads that pay on this machine: one a core up to a limit, and none on a single core."""
    cores = available_cores()
    return 0 if cores == 1 else min(cores, _MOST_WORKERS)


def in_order(
    read: Callable[[_Key], _Item],
    work: Callable[[_Item], _Result],
    keys: Iterable[_Key],
    *,
    workers: int,
    ahead: int,
) -> Generator[_Result, None, None]:
    """Yield `work(read(key))` for each key, in the keys' order.

    `read` is called in the caller's thread, key by key, so that it may be of any kind; `work` is
    called in threads. An error is raised where its result is due, after all earlier ones. When the
    iterator is closed or interrupted, what was not begun is dropped and no thread is left behind.

    Args:
        read: Gives the item of a key.
        work: Gives the result of an item.
        keys: The keys.
        workers: Threads, >= 0; 0 works in the caller's thread, one result at a time.
        ahead: Results that may wait for the caller, >= 1.
    """
    if workers == 0:
        for key in keys:
            yield work(read(key))
        return
    waiting: deque[Future[_Result]] = deque()
    executor = ThreadPoolExecutor(workers, thread_name_prefix="featcal-images")
    try:
        for key in keys:
            waiting.append(_begun(executor, read, work, key))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _begun(
    executor: ThreadPoolExecutor,
    read: Callable[[_Key], _Item],
    work: Callable[[_Item], _Result],
    key: _Key,
) -> "Future[_Result]":
    """The result to come; an error of reading waits in it for its turn, too."""
    try:
        return executor.submit(work, read(key))
    except Exception as error:
        failed: Future[_Result] = Future()
        failed.set_exception(error)
        return failed
