"""Files and folders that are written atomically.

A temporary file is next to the final one, hidden, and its name ends in `.part`. A process that is
killed leaves it there.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_128

from fusion_bench_featcal.errors import ReportError

LOG_DIR_SETTING = "path.log_dir"
PART = ".part"
TABLES = (".jsonl", ".json", ".csv", ".parquet")
"""Endings of tables of samples."""
PATH_STARTS = ("/", "./", "../", "~")
"""Texts that begin like this are paths, no hub ids."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?")


def destination(location: str | Path) -> Path:
    """Return the path to write to, which is where a link at a location leads.

    A folder cannot be moved to the place of a link.
    """
    path = Path(location).expanduser()
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def prepare_directory(directory: str | Path, setting: str = LOG_DIR_SETTING) -> Path:
    """Create a folder with its parents, check that files can be written, and return its path.

    Raises:
        ReportError: If it cannot be created or written. The message names it and `setting`.
    """
    directory = destination(directory).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _unwritable(directory, setting, error) from error
    return directory


def check_target(target: Path, setting: str) -> None:
    """Refuse a target that exists, because it is never replaced, or that cannot be written.

    Args:
        target: The folder (or file) for a model.
        setting: The setting with its name.

    Raises:
        ValueError: If it exists and is not an empty folder.
        ReportError: If the folder above it cannot be written.
    """
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{setting} {target} exists and is not empty: name a new folder")
    prepare_directory(target.absolute().parent, setting)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`. The file written there replaces `path` atomically.

    Raises:
        OSError: If it cannot be written. The old file stays.
    """
    partial = temporary_neighbour(path)
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync(path.parent)
    finally:
        remove(partial)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file with `new_file`."""
    with new_file(path) as partial:
        partial.write_bytes(data)


def write_atomic(path: Path, content: str | bytes, setting: str = LOG_DIR_SETTING) -> Path:
    """Write a result with `write_whole` and return its path.

    Raises:
        ReportError: If the file cannot be written. The message names `path` and `setting`.
    """
    try:
        write_whole(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _unwritable(path, setting, error) from error
    return path


@contextmanager
def new_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to `target`, which becomes `target` after success.

    Args:
        target: A path that is missing, or an empty folder.

    Raises:
        OSError: If something cannot be written, or `target` is not empty.
    """
    new = temporary_neighbour(target)
    try:
        yield new
        sync(*new.rglob("*"), new)
        os.replace(new, target)
    finally:
        remove(new)


def can_be_hub_id(location: str) -> bool:
    """Return whether a text has the form `NAME` or `OWNER/NAME`, perhaps with `@REVISION`.

    It may also be a path. Names of tables are no ids.
    """
    return bool(_HUB_ID.fullmatch(location)) and not location.lower().endswith(TABLES)


def is_missing(location: str) -> bool:
    """Return whether a text is certainly a path, and no hub id, and nothing is there."""
    is_path = location.startswith(PATH_STARTS) or location.endswith(TABLES)
    return is_path and not Path(location).expanduser().exists()


def existing(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return folder if folder.exists() else existing(folder.parent)


def free_space(folder: Path) -> int:
    """Return the free bytes of a folder's disk. The folder may be missing."""
    return shutil.disk_usage(existing(folder)).free


def sync(*paths: Path) -> None:
    """Flush files and folders to the disk, if the system can."""
    for entry in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(entry, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def temporary_neighbour(path: Path) -> Path:
    """Return a hidden path next to `path` that no other process uses. Nothing is created."""
    # A container's first process always has the same id, so the id alone is not enough.
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")


def remove(path: Path) -> None:
    """Remove a file or folder, ignoring errors. It may be missing."""
    shutil.rmtree(path, ignore_errors=True)  # does nothing to files and links
    with contextlib.suppress(OSError):
        path.unlink()


def digest_file(path: Path) -> str | None:
    """Return the XXH3 digest of a file, which is read whole, or None if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, xxh3_128).hexdigest()
    except OSError:
        return None


def link_or_copy(file: str | Path, copy: str | Path) -> None:
    """Create a hard link to a file, or a copy if the file system has no links."""
    try:
        os.link(file, copy, follow_symlinks=False)
    except OSError:
        shutil.copy2(file, copy)


def unwritten(error: Exception) -> str | None:
    """Return why a file cannot be written, as a cause for `errors.place.error_context`."""
    is_known = isinstance(error, OSError)
    return f"it cannot be written: {error.strerror or error}" if is_known else None


def _unwritable(path: Path, setting: str, error: OSError) -> ReportError:
    hint = f"Change {setting} to a writable directory."
    return ReportError(f"cannot write {path}: {error.strerror or error}. {hint}")
