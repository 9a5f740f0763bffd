"""Tables of samples: JSON lines, CSV and parquet files, saved datasets, and hub datasets."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import Any, cast

import datasets
from pyarrow import parquet

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.words import user_term
from fusion_bench_featcal.files import TABLES, can_be_hub_id
from fusion_bench_featcal.files.untrusted import parse_sample, pointer_text
from fusion_bench_featcal.models.hub import hub_error, note_data_set, patiently

_SEPARATORS = (";", "\t", "|")  # of tables that are not in CSV format


class FileRows(list[dict[str, Any]]):
    """Examples of a text file.

    Attributes:
        places: Place of each example in messages, such as `line 3`.
    """

    def __init__(self, rows: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Read pairs of place and example."""
        places, values = tuple(zip(*rows, strict=True)) or ((), ())
        super().__init__(values)
        self.places: tuple[str, ...] = places

    @property
    def column_names(self) -> list[str]:
        """Names of the columns of all examples."""
        return list(dict.fromkeys(name for row in self for name in row))


def require_indexable(rows: object, name: str) -> None:
    """Refuse anything but one dataset with a length and indices.

    Raises:
        CalibrationError: If `rows` is streamed, has several splits, or is not a dataset.
    """
    has_items = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    if not has_items or isinstance(rows, str | Mapping):
        content = f" of {', '.join(map(str, rows))}" if isinstance(rows, Mapping) else ""
        raise CalibrationError(
            f"{name}: expected a dataset with a length and an index, got a "
            f"{type(rows).__name__}{content}. Set its _target_, one split, or streaming=false"
        )


def split_location(location: str) -> tuple[str, str | None]:
    """Split `PATH:SPLIT` or `ID:SPLIT` into path or hub id and split. The split may be None."""
    name, colon, split = location.rpartition(":")
    if not colon or Path(location).expanduser().exists():
        return location, None
    return name, split


def parent_folder(data: object) -> Path:
    """Return the folder where relative paths in data start.

    It is the folder of a table `PATH` or `PATH:SPLIT`, and the working directory for other data.
    """
    return Path(split_location(data)[0]).expanduser().parent if isinstance(data, str) else Path()


def load_texts(path: str, split: str = "train") -> FileRows | datasets.Dataset:
    """Load a table of texts, without running code of a dataset.

    Args:
        path: A table (`.jsonl`, `.json`, `.csv`, `.parquet`), a folder that `datasets` has saved,
            or the id of a hub dataset, optionally with its config as `ID:CONFIG`. Folders and ids
            may end in `:SPLIT`.
        split: The split of a folder or hub dataset with several splits.

    Raises:
        ValueError: If there is no such file, folder or split.
        CalibrationError: If it cannot be read.
    """
    name, named = split_location(path)
    source = Path(name).expanduser()
    if source.is_file():
        return read_rows(source, named)
    if source.is_dir():
        return load_saved(source, named, split)
    return load_from_hub(name, source, named or split)


def is_saved(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def load_saved(folder: Path, split: str | None, usual_split: str | None) -> datasets.Dataset:
    """Read a folder written by `save_to_disk`.

    Args:
        folder: The folder.
        split: The split that the user named, or None.
        usual_split: The split to use otherwise, if the folder has several.

    Raises:
        ValueError: If the folder is no saved dataset, or has no such split.
    """
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        tables = sorted(file.name for file in folder.iterdir() if file.suffix in TABLES)
        hint = f"; name one of its tables {', '.join(tables)}" if tables else ""
        raise ValueError(f"data {str(folder)!r} is not a saved dataset ({error}){hint}") from error
    if isinstance(loaded, datasets.Dataset):
        if split is not None and split != loaded.split:
            raise ValueError(
                f"data {str(folder)!r} is one table without splits: remove split ({split!r}) and "
                "name the folder of that split"
            )
        return loaded
    split = split or usual_split
    if split is None or split not in loaded:
        names = " or ".join(sorted(map(str, loaded)))
        raise ValueError(
            f"data {str(folder)!r} has splits: choose one with {user_term('split')}, {names}, not "
            f"{split!r}"
        )
    return loaded[split]


def read_table(file: Path, split: str | None, label_column: str | None = None) -> datasets.Dataset:
    """Read a table as a dataset. In a CSV file, labels may be whole numbers.

    Other arguments and errors are the same as for `read_rows`.
    """
    rows = read_rows(file, split)
    if isinstance(rows, datasets.Dataset):
        return rows
    try:
        table = datasets.Dataset.from_list(rows)
    except (ValueError, TypeError) as error:  # of pyarrow, for columns of several types
        raise CalibrationError(f"data {str(file)!r}: {first_line(error)}") from error
    labels = list(table[str(label_column)]) if label_column in table.column_names else []
    if file.suffix.lower() == ".csv" and labels and all(label.isdecimal() for label in labels):
        return table.cast_column(str(label_column), datasets.Value("int64"))
    return table


def read_rows(file: Path, split: str | None) -> FileRows | datasets.Dataset:
    """Read a table by the ending of its name. All values of a CSV file are texts.

    Raises:
        ValueError: If the ending is unknown, or a split is named.
        CalibrationError: If it cannot be parsed. The message names the line.
    """
    ending = file.suffix.lower()
    if ending not in TABLES:
        raise ValueError(
            f"data {str(file)!r}: names of tables end in {', '.join(TABLES)}, got {ending!r}."
        )
    if split is not None:
        raise ValueError(
            f"data {str(file)!r} is one table without splits: remove split ({split!r}) and name "
            "the file of that split."
        )
    try:
        if problem := pointer_text(file):
            raise ValueError(problem)
        if ending == ".parquet":
            return datasets.Dataset(parquet.read_table(file))  # type: ignore[arg-type]
        text = _read_utf8(file)
        return FileRows(_csv_rows(text) if ending == ".csv" else _json_rows(text))
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise CalibrationError(
            f"data {str(file)!r} is not readable as {ending[1:]}: {first_line(error)}"
        ) from error


def _read_utf8(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not UTF-8: save the file in this encoding") from error


def _csv_rows(text: str) -> Iterator[tuple[str, dict[str, object]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names, begin = next(reader, []), reader.line_num + 1
    if len(set(names)) < len(names):
        raise ValueError("line 1 names a column twice")
    if len(names) == 1 and (mark := next((m for m in _SEPARATORS if m in names[0]), "")):
        raise ValueError(f"line 1 separates columns with {mark!r}, CSV needs commas: convert it")
    try:
        for values in reader:
            if values and len(values) != len(names):
                raise ValueError(f"line {begin}: {len(values)} values for {len(names)} columns")
            if values:
                yield f"line {begin}", dict(zip(names, values, strict=True))
            begin = reader.line_num + 1  # a value may have several lines
    except csv.Error as error:
        raise ValueError(f"line {begin}: {error}") from error


def _json_rows(text: str) -> Iterator[tuple[str, dict[str, object]]]:
    if text.lstrip().startswith("["):
        numbered = ((f"example {index}", row) for index, row in enumerate(parse_sample(text)))
    else:
        numbered = _json_lines(text)
    for place, row in numbered:
        if not isinstance(row, dict):
            raise ValueError(f"{place} is of type {type(row).__name__}, not an object")
        yield place, row


def _json_lines(text: str) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip():
                yield f"line {number}", parse_sample(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from error


def load_from_hub(name: str, source: Path, split: str | None) -> datasets.Dataset:
    """Load a split of a hub dataset. `source` is the same name as a path, which does not exist.

    Raises:
        ValueError: If the name looks like a path, or no split is named.
        CalibrationError: If it cannot be loaded.
    """
    repository, _, config = name.partition(":")
    is_file_name = "/" not in name and "." in repository  # with any ending
    if split is None or is_file_name or "/" in config or not can_be_hub_id(repository):
        raise ValueError(
            f"data {name!r} is neither a file nor a folder at {source.absolute()}: correct the "
            "path, or, if it is the id of a hub dataset, name its split with "
            f"{user_term('split')} (often train or test)"
        )
    return load_hub_split(repository, config or None, split)


def load_hub_split(path: str, config: str | None, split: str) -> datasets.Dataset:
    """Load a split with `datasets`, with retries if the hub is busy. Record the dataset's commit.

    Args:
        path: Hub id or folder.
        config: The dataset's configuration, or None.
        split: The split.

    Raises:
        ValueError: If `datasets` would treat a folder as a pattern and match it with other folders.
        CalibrationError: If it cannot be loaded.
    """
    if has_magic(path) and Path(path).expanduser().is_dir():
        raise ValueError(
            f"data {path!r}: rename the folder, because *, ? and [ would be read as a pattern"
        )
    name = path if config is None else f"{path}:{config}"
    try:
        loaded = patiently(partial(datasets.load_dataset, path, config, split=split))
    except Exception as error:  # any error of the hub's client or the network
        raise hub_error(error, f"data {name!r}, split {split!r}") from error
    note_data_set(loaded)
    return cast(datasets.Dataset, loaded)
