"""Claims of cells in a shared store, so that several processes run no cell twice.

A claim is a file that one process creates exclusively. If its process has died, the claim is not
removed but followed by one with the next number, so that only one process takes over.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from fusion_bench_featcal.files import remove
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

BEAT_SECONDS = 30
EXPIRES_SECONDS = 600
"""Age of the last sign of life after which a claim of another host is invalid."""
_TRIES = 2


class Busy(Exception):
    """Another process holds the claim."""


@contextmanager
def claimed(path: Path, run: str) -> Iterator[None]:
    """Hold the claim of a cell while its block runs.

    Args:
        path: Path of the claim without its number. Without write access there is no claim.
        run: Name of the driver's run.

    Raises:
        Busy: If another process holds it.
        CalibrationError: If the cell's process died twice in this run.
    """
    try:
        file = _take(path, run)
    except OSError as error:
        log.warning("no claim in %s, another process may run the same cell: %s", path, error)
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(file, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _release(path)


def _take(path: Path, run: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = _files(path)
    tries = 1
    if files:
        last = _read(files[-1])
        if _is_alive(files[-1], last):
            raise Busy
        tries += last.get("tries", 1) if last.get("run") == run else 0
        if tries > _TRIES:
            _release(path)
            raise CalibrationError(
                f"its process died {_TRIES} times, the last one on {last['host']} (process "
                f"{last['pid']}). The system may have killed it for want of memory"
            )
        log.warning("%s: the process that ran this cell has died", path.name)
    number = int(files[-1].suffix[1:]) + 1 if files else 1
    file = path.with_name(f"{path.name}.{number:03d}")
    me = {"host": socket.gethostname(), "pid": os.getpid(), "born": psutil.Process().create_time()}
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        raise Busy from None
    with open(descriptor, "w", encoding="utf-8") as stream:
        json.dump({**me, "run": run, "tries": tries, "time": time.time()}, stream)
    return file


def _files(path: Path) -> list[Path]:
    """Claims of a cell, the latest one last."""
    return sorted(path.parent.glob(f"{path.name}.*"))


def _release(path: Path) -> None:
    for file in _files(path):  # the latest one last, since it is the valid one
        remove(file)


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the file is being written or removed
        return {}


def _is_alive(file: Path, claim: dict[str, Any]) -> bool:
    if claim.get("host") == socket.gethostname():
        try:
            process = psutil.Process(claim["pid"])
            # A killed process remains as a zombie until its parent collects it.
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            return process.create_time() == claim["born"] and not is_zombie
        except psutil.Error:
            return False
    try:
        return time.time() - file.stat().st_mtime < EXPIRES_SECONDS
    except OSError:
        return True  # just released


def _beat(file: Path, ended: threading.Event) -> None:
    """Update a claim's modification time until its cell has ended."""
    while not ended.wait(BEAT_SECONDS):
        try:
            os.utime(file)
        except OSError as error:
            log.warning("the claim %s cannot be renewed: %s", file, error)
