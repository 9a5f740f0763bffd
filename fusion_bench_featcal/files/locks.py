"""Locks that keep two runs from writing one folder."""

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files import PART, prepare_directory, remove

log = logging.getLogger(__name__)


def locked_target(target: Path, option: str) -> AbstractContextManager[None]:
    """Return a context in which no other process writes a file or folder that may be missing.

    The lock is next to it. Temporary files that killed processes wrote for it are removed.

    Args:
        target: The file or folder.
        option: The option that names it, such as `--out`.

    Raises:
        CalibrationError: If another process has the lock.
        ReportError: If the folder above it cannot be written.
    """
    target = target.absolute()
    lock = target.with_name(f".{target.name}.lock")
    return _locked(lock, option, target, re.escape(target.name))


def locked_folder(folder: Path, option: str, files: str) -> AbstractContextManager[None]:
    """Return a context in which no other process writes in a folder, created if necessary.

    The lock is in the folder. Temporary files of killed processes in it are removed.

    Args:
        folder: The folder.
        option: The option that names it, such as `checkpoint_dir`.
        files: Pattern of the files that are written in it.

    Raises:
        CalibrationError: If another process has the lock.
        ReportError: If the folder cannot be written.
    """
    folder = folder.absolute()
    return _locked(folder / ".lock", option, folder, files)


@contextmanager
def _locked(file: Path, option: str, target: Path, names: str) -> Iterator[None]:
    """Context with a lock, if the disk has locks.

    The system releases it when this process ends in any way.

    Args:
        file: The lock.
        option: The option that names the target.
        target: What is written.
        names: Pattern of the files for which killed processes may have left temporary ones.
    """
    with _directory(file.parent, option):
        lock, is_new = FileLock(file), not file.exists()
        try:
            lock.acquire(blocking=False)
        except (Timeout, PermissionError) as error:  # that of another user cannot be opened
            raise CalibrationError(
                f"{option} {target} is in use by another process. Wait until it ends, or name "
                "another folder"
            ) from error
        except OSError as error:
            warning = "%s %s cannot be locked (%s): do not start a second run with it"
            log.warning(warning, option, target, error)
        try:
            if lock.is_locked:
                leftover = rf"\.({names})\.[0-9a-f]{{8}}{re.escape(PART)}"
                for path in file.parent.iterdir():
                    if re.fullmatch(leftover, path.name):
                        log.warning("removing %s, left by an interrupted run", path)
                        remove(path)
            yield
        finally:
            if lock.is_locked or is_new:  # else the file may be that of another run
                file.unlink(missing_ok=True)  # before the release: nobody else has this file
            lock.release()


@contextmanager
def _directory(folder: Path, option: str) -> Iterator[None]:
    """Context with a folder and its parents. Of these, new ones that stay empty are removed."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    prepare_directory(folder, option)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty
            for path in new:
                path.rmdir()
