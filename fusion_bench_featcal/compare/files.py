"""Files that a run leaves behind: written whole or not at all."""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

LOG_DIR_SETTING = "path.log_dir"


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


def write_atomic(path: Path, content: str | bytes, setting: str = LOG_DIR_SETTING) -> Path:
    """Write `content` to a temporary neighbour of `path` and move it into place.

    A reader sees the old file or the new one, never a part of it; nothing is left after a failure.

    Raises:
        ReportError: The file cannot be written; the message names `path` and `setting`.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=".part"
        )
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes private files; results are as public as the user's umask says.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise _unwritable(path, setting, error) from error
    return path


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ReportError: The file is missing, unreadable or not JSON.
    """
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ReportError(f"{path} is not valid JSON: {error}") from error


def plain(value: Any, place: str) -> Any:
    """Reduce `value` to what JSON can hold: dataclasses, mappings, sequences, paths, scalars.

    Args:
        value: Anything made of those; numpy and torch scalars count as numbers.
        place: Where the value stands, for the error message.

    Raises:
        ReportError: A part of the value has no JSON form, or is NaN or infinite.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ReportError(f"{place}: {value} cannot be kept in report.json")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value), place)
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        ordered = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [plain(item, f"{place}[{index}]") for index, item in enumerate(ordered)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0:
        return plain(value.item(), place)  # pyright: ignore[reportAttributeAccessIssue]
    raise ReportError(f"{place}: a {type(value).__name__} cannot be kept in report.json")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _unwritable(path: Path, setting: str, error: OSError) -> ReportError:
    reason = error.strerror or str(error)
    return ReportError(f"cannot write {path}: {reason}. Change {setting} to a writable directory.")
