"""Files that a run leaves behind: written whole or not at all."""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

LOG_DIR_SETTING = "path.log_dir"
DIGEST = "digest"
_PARTIAL = ".part"
_LINE_DIGITS = 16  # of a digest that stands in every line
_told: list[Path] = []


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
            dir=path.parent, prefix=partial_prefix(path.name), suffix=_PARTIAL
        )
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes private files; results are as public as the user's umask says.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise _unwritable(path, setting, error) from error
    finally:  # after a signal, too
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return path


def sealed_json(content: Mapping[str, Any]) -> str:
    """Return the text of a JSON file that carries the digest of its own content.

    Args:
        content: What the file holds, fit for JSON.
    """
    # It comes first: no gap in the file takes the digest away and leaves other content.
    return json.dumps({DIGEST: _digest(content), **content}, indent=2, allow_nan=False) + "\n"


def read_json(path: Path, *, sealed: bool = False) -> Any:
    """Read a JSON file, and check its digest if it has one.

    Args:
        path: The file.
        sealed: Refuse a file without a digest; otherwise the log says once that there are such.

    Returns:
        The content without its digest.

    Raises:
        ReportError: The file is missing, unreadable, not JSON, holds numbers that are not finite or
            beyond 64 bits, or is not what was written.
    """
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is not valid JSON: {error}") from error
    seal = content.pop(DIGEST, None) if isinstance(content, dict) else None
    if seal is None and sealed:
        raise ReportError(f"{path} has no digest")
    if seal is None:
        tell_without_digest(path)
    elif seal != _digest(content):
        raise ReportError(
            f"{path} is damaged: its digest does not fit its content. Restore it or run again (if "
            f'it was edited on purpose, remove its key "{DIGEST}")'
        )
    return content


def sealed_lines(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a JSON lines file whose lines carry the digest of them all.

    Args:
        records: What the lines hold, fit for JSON.
    """
    # In each line: none can be missing, or be changed, unnoticed.
    digest = _digest(records)[:_LINE_DIGITS]
    return "".join(
        json.dumps({**record, DIGEST: digest}, allow_nan=False) + "\n" for record in records
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON lines file, and check the digest that its lines carry if they do.

    Args:
        path: The file.

    Returns:
        The records without their digest.

    Raises:
        ReportError: The file cannot be read, is empty, a line of it is no JSON object, or it is not
            what was written.
    """
    records = []
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ReportError(f"{path}, line {number} is not a record")
            records.append(record)
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{path} is damaged: {error}") from error
    digests = [record.pop(DIGEST, None) for record in records]
    if not records:
        raise ReportError(f"{path} is damaged: it is empty")
    if not any(digests):
        tell_without_digest(path)
    elif set(map(str, digests)) != {_digest(records)[:_LINE_DIGITS]}:
        raise ReportError(f"{path} is damaged: its digest does not fit its content")
    return records


def parse_json(data: bytes | str) -> Any:
    """Parse JSON strictly.

    Raises:
        ValueError: It is not UTF-8 or not JSON, or a number is not finite or beyond 64 bits.
        RecursionError: It is nested too deeply.
    """
    text = data.decode() if isinstance(data, bytes) else data
    return json.loads(text, parse_constant=_refuse, parse_float=_float, parse_int=_integer)


def tell_without_digest(path: Path) -> None:
    """Say, once in a process, that a file of an earlier version cannot be checked."""
    if not _told:
        log.info(
            "%s was written by an earlier version, without a digest: damage to it, or to others "
            "like it, may go unnoticed",
            path,
        )
        _told.append(path)


def sweep_partial(paths: Iterable[Path]) -> None:
    """Remove what killed processes left half-written.

    Args:
        paths: Temporary neighbours of files; those of a living process stay.
    """
    for path in paths:
        match = re.search(r"\.(\d+)\.[^.]*\.part$", path.name)
        if match is not None and _is_alive(int(match.group(1))):
            continue
        log.info("removing what an interrupted run left: %s", path)
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that it holds; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def partial_prefix(name: str) -> str:
    """Return the prefix of a temporary neighbour's name; its suffix is `.part`."""
    return f".{name}.{os.getpid()}."


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


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _integer(text: str) -> int:
    return int(text) if len(text) <= 20 else _refuse(text)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    return True


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _unwritable(path: Path, setting: str, error: OSError) -> ReportError:
    reason = error.strerror or str(error)
    return ReportError(f"cannot write {path}: {reason}. Change {setting} to a writable directory.")
