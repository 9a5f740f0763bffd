"""Flags per test item of each row, and their file."""

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, write_atomic

ITEMS_FILE = "items.npz"
_MOST_BYTES = 2**31  # of all flags, unpacked

Items = dict[str, dict[str, NDArray[np.bool_]]]
"""Row name -> task -> bool `[items]`, in the test set's order."""


def as_correct(values: Any, label: str) -> NDArray[np.bool_]:
    """Convert one task's flags (array, list or CPU tensor of bool or 0/1) to bool `[items]`."""
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise ReportError(f"{label}: expected one flag per test item, got shape {array.shape}")
    if array.dtype != np.bool_ and not np.isin(array, (0, 1)).all():
        raise ReportError(f"{label}: flags per test item must be true or false")
    return array.astype(np.bool_)


def save_items(directory: Path, items: Mapping[str, Mapping[str, Any]],
               setting: str = LOG_DIR_SETTING) -> Path:  # fmt: skip
    """Write `items.npz` into an existing folder, which `setting` chose.

    Row and task names may contain any character, because arrays are numbered. A JSON index, stored
    as bytes to avoid pickle, maps them to names.
    """
    index = [(row, task) for row, tasks in items.items() for task in tasks]
    arrays: dict[str, NDArray[Any]] = {
        f"array_{number}": as_correct(items[row][task], f"row '{row}', task '{task}'")
        for number, (row, task) in enumerate(index)
    }
    arrays["index"] = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    return write_atomic(Path(directory) / ITEMS_FILE, _sealed(buffer.getvalue()), setting)


def _sealed(archive: bytes) -> bytes:
    """Store the archive's digest in its comment, the last part of a zip file."""
    digest = hashlib.sha256(archive).hexdigest().encode()
    return archive[:-2] + len(digest).to_bytes(2, "little") + digest


def _check_seal(content: bytes, path: Path) -> None:
    length = 2 * hashlib.sha256().digest_size
    has_seal = content[-length - 2 : -length] == length.to_bytes(2, "little")
    if has_seal and _sealed(content[: -length - 2] + b"\0\0") != content:
        raise ReportError(f"{path} is damaged: its digest does not fit its content")


def load_items(directory: Path) -> Items | None:
    """Read `items.npz` from `directory`. Return None if the run has none.

    Raises:
        ReportError: If the file is damaged or not from `save_items`. A file of an earlier
            version has no digest, but checksums of its members detect most damage.
    """
    path = Path(directory) / ITEMS_FILE
    if not path.exists():
        return None
    try:
        # Read from memory, because numpy leaves a damaged file open.
        content = path.read_bytes()
        _check_seal(content, path)
        return _unpacked(content, path)
    except ReportError:
        raise
    # Any error of zip, its decompressors and numpy for invalid bytes.
    except Exception as error:
        raise ReportError(f"{path} is damaged: {error!r}") from error


def _unpacked(content: bytes, path: Path) -> Items:
    items: Items = {}
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        size = sum(entry.file_size for entry in archive.zip.infolist())
        if size > _MOST_BYTES:
            raise ValueError(f"it unpacks to {size} bytes")
        for number, (row, task) in enumerate(json.loads(archive["index"].tobytes())):
            label = f"{path}: row {row!r}, task {task!r}"
            tasks = items.setdefault(row, {})
            if not isinstance(row, str) or not isinstance(task, str) or task in tasks:
                raise ValueError(f"row {row!r}, task {task!r} is no new entry")
            tasks[task] = as_correct(archive[f"array_{number}"], label)
    return items
