"""Files and folders that are written whole or not at all, and the removal of what a kill leaves.

A temporary name ends in `<host>-<process id>-<anything>.part` (or `.old`), beside the place of the
file. A process that is killed leaves it behind; the next one on the same host recognises it.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

LOG_DIR_SETTING = "path.log_dir"
PART, OLD = ".part", ".old"
_COUNT = itertools.count()
_OWN: set[str] = set()


class ReportError(RuntimeError):
    """A result cannot be written, read or compared. The message names the place and the cause."""


def prepare_directory(directory: str | Path, setting: str = LOG_DIR_SETTING) -> Path:
    """Create `directory` (with parents) and make sure that files can be put into it.

    Call it before hours of work, not only after them.

    Args:
        directory: The folder results go to.
        setting: The setting that chose the folder, named in the error message.

    Returns:
        The folder as an absolute path.

    Raises:
        ReportError: A file stands in the folder's place, or it cannot be created or written.
    """
    directory = Path(directory).absolute()
    for part in (directory, *directory.parents):
        if part.exists() and not part.is_dir():
            raise ReportError(
                f"cannot write results to {directory}: {part} is a file, not a directory. "
                f"Remove it or change {setting}."
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _unwritable(directory, setting, error) from error
    return directory


@contextmanager
def new_file(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a new path beside `path`; the file that is made there is moved into place.

    A reader, or a process that begins after a kill, sees the old file or the new one.

    Args:
        path: The file; its folder exists.
        durable: Whether it must outlive a loss of power too.

    Raises:
        OSError: It cannot be written; the old file stays.
    """
    partial = temporary_neighbour(path)
    try:
        yield partial
        if durable:
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
        if durable:
            sync(path.parent)
    finally:  # after a signal, too
        remove(partial)


def write_whole(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file as `new_file` does."""
    with new_file(path, durable=durable) as partial:
        partial.write_bytes(data)


def write_atomic(path: Path, content: str | bytes, setting: str = LOG_DIR_SETTING) -> Path:
    """Write a result as `write_whole` does; return its path.

    Raises:
        ReportError: The file cannot be written; the message names `path` and `setting`.
    """
    try:
        write_whole(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _unwritable(path, setting, error) from error
    return path


@contextmanager
def replacing(target: Path, dropped: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a new path beside `target`, and put what is made there in the target's place.

    The new content is brought to the disk, then swapped in by two renames. A process that is
    killed leaves the old content or the new one whole; `clear_leftovers` repairs the rest. What an
    existing folder holds and the new one lacks is carried over.

    Args:
        target: The folder or file; it may be missing.
        dropped: Patterns of names that are not carried over.

    Raises:
        OSError: If something cannot be written or moved; the old content is as it was then.
    """
    clear_leftovers(target, dropped)
    new = temporary_neighbour(target)
    try:
        yield new
        sync(*new.rglob("*"), new)
        _swap(new, target, dropped)
    finally:
        remove(new)


def clear_leftovers(target: Path, dropped: Sequence[str] = ()) -> None:
    """Finish or undo replacements of `target` that dead processes of this host had begun."""
    for leftover in orphans(target.parent, f".{target.name}."):
        if leftover.suffix == OLD:  # it was moved away when the new folder was complete
            new = leftover.with_suffix(PART)
            if not target.exists():
                os.rename(new if new.exists() else leftover, target)
                log.warning("%s was being replaced when a process ended: it is whole again", target)
            if leftover.is_dir():
                _carry_over(leftover, target, dropped)
    remove_orphans(target.parent, f".{target.name}.")


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, as `sha256sum` prints it."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def free_space(folder: Path) -> int:
    """Return the free bytes of the disk that a folder is on or, if it is missing, will be on."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def sync(*paths: Path) -> None:
    """Bring files, and the entries of folders, to the disk, where the system can."""
    for entry in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(entry, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def owner_mark() -> str:
    """Return `<host>-<process id>` of this process."""
    return f"{_host()}-{os.getpid()}"


def temporary_neighbour(path: Path) -> Path:
    """Return a hidden name beside `path` that no other process uses; nothing is made."""
    return register(path.with_name(f".{path.name}.{owner_mark()}-{next(_COUNT)}{PART}"))


def register(path: Path) -> Path:
    """Note that this process made `path`, which holds `owner_mark()`; return it.

    A container's first process has the same id in every start, so the id alone does not tell.
    """
    _OWN.add(path.name)
    return path


def orphans(folder: Path, prefix: str = "") -> list[Path]:
    """List what dead processes of this host left in a folder.

    Args:
        folder: The folder; it may be missing.
        prefix: Beginning of the names to look for.
    """
    try:
        return sorted(p for p in folder.iterdir() if p.name.startswith(prefix) and _is_orphan(p))
    except OSError:
        return []


def remove_orphans(folder: Path, prefix: str = "") -> None:
    """Remove what dead processes of this host left in a folder; see `orphans`."""
    for path in orphans(folder, prefix):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder as far as possible; it may be missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _swap(new: Path, target: Path, dropped: Sequence[str]) -> None:
    if not (new.is_dir() and target.is_dir()):
        os.replace(new, target)
        return
    shutil.copymode(target, new)
    _carry_over(target, new, dropped)
    old = new.with_suffix(OLD)
    os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise
    _carry_over(old, target, dropped)  # what was written meanwhile, such as a log
    remove(old)


def _carry_over(source: Path, destination: Path, dropped: Sequence[str]) -> None:
    """Give a folder what another holds besides, by hard links."""
    for entry in source.iterdir():
        if not any(fnmatch(entry.name, pattern) for pattern in dropped):
            _link(entry, destination / entry.name)


def _link(source: Path, destination: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        destination.mkdir(exist_ok=True)
        for entry in source.iterdir():
            _link(entry, destination / entry.name)
    elif not os.path.lexists(destination):
        try:
            # A hard link: a log file that is open stays the same file.
            os.link(source, destination, follow_symlinks=False)
        except FileNotFoundError:  # somebody removed it meanwhile
            return
        except OSError:  # a file system without them
            shutil.copy2(source, destination, follow_symlinks=False)


def _is_orphan(path: Path) -> bool:
    match = re.search(rf"[.-]{re.escape(_host())}-(\d+)-\w+\.(?:part|old)$", path.name)
    if match is None or path.with_suffix(PART).name in _OWN:
        return False
    pid = int(match[1])
    return pid == os.getpid() or not psutil.pid_exists(pid)


def _host() -> str:
    return re.sub(r"[^0-9A-Za-z-]", "-", socket.gethostname())[:40]


def _unwritable(path: Path, setting: str, error: OSError) -> ReportError:
    reason = error.strerror or str(error)
    return ReportError(f"cannot write {path}: {reason}. Change {setting} to a writable directory.")
