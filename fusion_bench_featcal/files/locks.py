"""Locks that keep two runs from writing one folder."""

import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import at
from fusion_bench_featcal.files import PART, prepare_directory, remove, unwritten

log = logging.getLogger(__name__)


@contextmanager
def locked_target(target: Path, option: str) -> Iterator[None]:
    """Context in which no other process writes a file or folder that may be missing.

    The lock is next to it. Temporary files that killed processes wrote for it are removed.

    Args:
        target: The file or folder.
        option: The option that names it, such as `--out`.

    Raises:
        CalibrationError: If another process has the lock.
        ReportError: If the folder above it cannot be written.
    """
    target = target.absolute()
    with (
        _directory(target.parent, option) as folder,
        _locked(folder / f".{target.name}.lock", f"{option} {target}"),
    ):
        _remove_leftovers(folder, re.escape(target.name))
        yield


@contextmanager
def locked_folder(folder: Path, option: str, files: str) -> Iterator[None]:
    """Context in which no other process writes in a folder, which is created if necessary.

    The lock is in the folder. Temporary files of killed processes in it are removed.

    Args:
        folder: The folder.
        option: The option that names it, such as `checkpoint_dir`.
        files: Pattern of the files that are written in it.

    Raises:
        CalibrationError: If another process has the lock.
        ReportError: If the folder cannot be written.
    """
    with (
        _directory(folder.absolute(), option) as folder,
        _locked(folder / ".lock", f"{option} {folder}"),
    ):
        _remove_leftovers(folder, files)
        yield


@contextmanager
def _directory(folder: Path, option: str) -> Iterator[Path]:
    """Context with a folder and its parents. Of these, new ones that stay empty are removed."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    prepare_directory(folder, option)
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty
            for path in new:
                path.rmdir()


@contextmanager
def _locked(lock: Path, label: str) -> Iterator[None]:
    """Context with a lock, a file with the process that has it.

    The system releases it when that process ends in any way.
    """
    with _acquired(lock, label) as file:
        try:
            if former := file.read().strip():
                log.warning("%s: taken over from %s, which has ended", label, former)
            file.truncate(0)
            with at(lock, cause=unwritten):
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
            yield
        finally:
            lock.unlink(missing_ok=True)  # before the release: nobody else has this file


def _remove_leftovers(folder: Path, names: str) -> None:
    """Remove temporary files that killed processes wrote for files with names of a pattern."""
    for path in folder.iterdir():
        if re.fullmatch(rf"\.({names})\.[0-9a-f]{{8}}{re.escape(PART)}", path.name):
            log.warning("removing %s, left by an interrupted run", path)
            remove(path)


def _owner(file: IO[str]) -> str:
    """Return the process that has a lock. It writes its number right after it has it."""
    for _ in range(50):
        file.seek(0)
        if owner := file.read().strip():
            return owner
        time.sleep(0.01)
    return "another run"


@contextmanager
def _acquired(lock: Path, label: str) -> Iterator[IO[str]]:
    """Yield the open file of a lock that this process has."""
    import fcntl  # absent on Windows

    with at(lock, cause=unwritten):
        opened = open(lock, "a+", encoding="utf-8")  # noqa: SIM115  closed below
    with opened as file:
        file.seek(0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CalibrationError(
                f"{label} is in use by {_owner(file)}. Wait until it ends, or name another folder"
            ) from error
        except OSError as error:
            log.warning("%s cannot be locked (%s): start no second run with it", label, error)
        if _is_at(file, lock):
            try:
                yield file
            finally:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)  # also for child processes that inherited it
            return
    with _acquired(lock, label) as file:  # the former owner has removed it since it was opened
        yield file


def _is_at(file: IO[str], path: Path) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
