"""Which test items each row of a report got right: what a paired bootstrap needs."""

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import LOG_DIR_SETTING, ReportError, write_atomic

ITEMS_FILE = "items.npz"

Items = dict[str, dict[str, NDArray[np.bool_]]]
"""Row name -> task -> bool `[items]`, in the test set's order."""


def as_correct(values: Any, place: str) -> NDArray[np.bool_]:
    """Turn one task's flags (array, list or CPU tensor, bool or 0/1) into a bool array `[items]`.

    Raises:
        ReportError: Not one-dimensional, empty, or holding anything but true and false.
    """
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise ReportError(f"{place}: expected one flag per test item, got shape {array.shape}")
    if array.dtype != np.bool_ and not np.isin(array, (0, 1)).all():
        raise ReportError(f"{place}: flags per test item must be true or false")
    return array.astype(np.bool_)


def save_items(directory: Path, items: Mapping[str, Mapping[str, Any]],
               setting: str = LOG_DIR_SETTING) -> Path:  # fmt: skip
    """Write `items.npz` into `directory`.

    Row and task names may hold any character: arrays are numbered, and a JSON index (stored as
    bytes, so that no pickle is involved) tells which is which.

    Args:
        directory: An existing folder.
        items: Row name -> task -> bool `[items]`.
        setting: The setting that chose the folder, named in error messages.

    Raises:
        ReportError: Flags are malformed or the file cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {}
    index: list[tuple[str, str]] = []
    for row, tasks in items.items():
        for task, values in tasks.items():
            arrays[f"array_{len(index)}"] = as_correct(values, f"row '{row}', task '{task}'")
            index.append((row, task))
    arrays["index"] = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    return write_atomic(Path(directory) / ITEMS_FILE, buffer.getvalue(), setting)


def load_items(directory: Path) -> Items | None:
    """Read `items.npz` from `directory`; None when the run left none.

    Raises:
        ReportError: The file is damaged or not one that `save_items` wrote.
    """
    path = Path(directory) / ITEMS_FILE
    if not path.exists():
        return None
    items: Items = {}
    try:
        # From memory: numpy leaves a damaged file open.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            for number, (row, task) in enumerate(json.loads(archive["index"].tobytes())):
                place = f"{path}: row '{row}', task '{task}'"
                items.setdefault(row, {})[task] = as_correct(archive[f"array_{number}"], place)
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ReportError(f"{path} is damaged: {error}") from error
    return items
