"""Tables of samples: JSON lines, CSV and parquet files, saved datasets, and hub datasets."""

from collections.abc import Mapping
from glob import escape, has_magic
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import datasets
import pyarrow.csv
from datasets.config import HF_HUB_OFFLINE

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.models.hub import note_data_set
from fusion_bench_featcal.models.hub_errors import hub_error

TABLE_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def require_numbered(rows: Any, name: str) -> None:
    """Refuse anything but one dataset with a length and numbered items.

    Raises:
        CalibrationError: If it is streamed, has several splits, or is not a dataset.
    """
    if isinstance(rows, Mapping):
        raise CalibrationError(
            f"{name}: one dataset is needed, got a mapping of {', '.join(map(str, rows))}: set "
            "its _target_, or the split that it loads"
        )
    has_items = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    if not has_items or isinstance(rows, str):
        raise CalibrationError(
            f"{name}: a dataset with a length and numbered items is needed, got "
            f"{type(rows).__name__}. Load it without streaming."
        )


def split_of(location: str) -> tuple[str, str | None]:
    """Return path or hub id of `PATH:SPLIT` or `ID:SPLIT`, and the split, or None without one."""
    name, colon, split = location.rpartition(":")
    if not colon or Path(location).expanduser().exists():
        return location, None
    return name, split


def load_texts(path: str, split: str = "train") -> datasets.Dataset:
    """Load a table of texts, without running code of a dataset.

    Args:
        path: A table (`.jsonl`, `.json`, `.csv`, `.parquet`), a folder that `datasets` has saved,
            or the id of a hub dataset, optionally with its config as `ID:CONFIG`. Folders and ids
            may end in `:SPLIT`.
        split: The split of a folder or hub dataset with several.

    Raises:
        ValueError: If there is no such file, folder or split.
        CalibrationError: If it cannot be read.
    """
    name, named = split_of(path)
    source = Path(name).expanduser()
    if source.is_file():
        return read_table(source, named)
    if source.is_dir():
        return _saved(source, named or split)
    return from_hub(name, source, named or split)


def _saved(folder: Path, split: str) -> datasets.Dataset:
    """Read a folder written by `save_to_disk`."""
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        tables = sorted(file.name for file in folder.iterdir() if file.suffix in TABLE_READERS)
        hint = f"; name one of its tables {', '.join(tables)}" if tables else ""
        raise ValueError(f"data {str(folder)!r} is no saved dataset ({error}){hint}") from error
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if split not in loaded:
        raise ValueError(f"data {str(folder)!r} has no split {split!r}, only {sorted(loaded)}")
    return loaded[split]


def read_table(file: Path, split: str | None) -> datasets.Dataset:
    """Read a table by the ending of its name.

    Raises:
        ValueError: If the ending is unknown, or a split is named.
        CalibrationError: If it cannot be parsed.
    """
    reader = TABLE_READERS.get(file.suffix.lower())
    if reader is None:
        raise ValueError(
            f"data {str(file)!r}: tables end in {', '.join(TABLE_READERS)}, got {file.suffix!r}."
        )
    if split is not None:
        raise ValueError(
            f"data {str(file)!r} is one table without splits: remove split ({split!r}) and name "
            "the file of that split."
        )
    if file.stat().st_size == 0:
        raise ValueError(f"data {str(file)!r} is empty.")
    try:
        if reader == "csv":  # the reader of `datasets` leaves the file open
            return datasets.Dataset(pyarrow.csv.read_csv(file))
        with TemporaryDirectory() as cache:  # the home folder may be read-only
            # `datasets` takes paths as patterns
            loaded = datasets.load_dataset(
                reader,
                data_files=escape(str(file)),
                split="train",
                cache_dir=cache,
                keep_in_memory=True,
            )
    except Exception as error:  # the readers pass on any error of their parsers
        cause = error.__cause__ or error
        if isinstance(cause, PermissionError):
            raise cause from error
        raise CalibrationError(
            f"data {str(file)!r} is not readable as {reader}: {str(cause) or type(cause).__name__}"
        ) from error
    return cast(datasets.Dataset, loaded)


def check_literal(folder: str) -> None:
    """Refuse a folder that `datasets` would treat as a pattern and match with other folders.

    Raises:
        ValueError: If a folder exists whose path contains *, ? or [.
    """
    if has_magic(folder) and Path(folder).expanduser().is_dir():
        raise ValueError(f"data {folder!r}: rename the folder: *, ? and [ would be a pattern")


def from_hub(name: str, source: Path, split: str | None) -> datasets.Dataset:
    """Load a split of a hub dataset. `source` is the path without a file or folder.

    Raises:
        ValueError: If the name looks like a path, or no split is named.
        CalibrationError: If it cannot be loaded.
    """
    repository, _, config = name.partition(":")
    is_path = name.startswith((".", "/", "~", "\\")) or name.count("/") > 1
    is_path |= "/" not in name and "." in repository  # a file name with any ending
    if is_path or source.suffix.lower() in TABLE_READERS:
        raise ValueError(
            f"data {name!r} does not exist: neither a file nor a folder at {source.absolute()}."
        )
    if split is None:
        correct = "correct the path" if "/" in name else "give a path that exists"
        raise ValueError(
            f"data {name!r} is neither a file nor a folder at {source.absolute()}: {correct}, or, "
            "if it is the id of a hub dataset, set split (often train or test)"
        )
    option = f"data {name!r}, split {split!r}"
    try:
        loaded = datasets.load_dataset(repository, config or None, split=split)
    except Exception as error:  # any error of the hub's client or the network
        raise hub_error(error, option) from error
    note_data_set(loaded)
    return cast(datasets.Dataset, loaded)


def offline_hint() -> str:
    """Return a hint for messages about failed loading, or an empty text when online."""
    if not HF_HUB_OFFLINE:
        return ""
    return " HF_HUB_OFFLINE is set: only local files and what is already in the cache are found."
