"""`load_images`: folders, tables and hub data sets as pictures with labels."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import datasets
import pyarrow.csv
from datasets.config import HF_HUB_OFFLINE

from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tasks.images import ImageItems
from fusion_bench_featcal.tasks.labels import check_classnames_by, sort_names

IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
TABLE_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
SPLIT_FOLDERS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


def load_images(
    path: str,
    split: str | None = None,
    image_column: str = "image",
    label_column: str | None = "label",
    classnames: Sequence[str] | None = None,
    background: str | None = None,
    classnames_by: str = "name",
) -> ImageItems:
    """Load pictures from a folder, a table or the hub, without running anybody's code.

    - A folder: one subfolder of images per class, or images only (then they are unlabeled). Where
      it holds a folder per split (`train`, `test`), `split` says which.
    - A table (`.jsonl`, `.csv`, `.parquet`): `image_column` holds paths, relative to the table's
      own folder, or the images themselves; `label_column`, if there is one, integers or class
      names.
    - Anything else is the id of a hub data set; `split` is needed.

    Args:
        path: The folder, the table or the hub id. Relative paths start at the current folder.
        split: The split to take, where there are several.
        image_column: Column that holds the images.
        label_column: Column that holds the labels; where there is none, or this is None, the items
            are unlabeled.
        classnames: Class names by label. By default the folders' names, the data set's own class
            names, or the distinct text labels in alphabetical order (numbers in theirs).
        background: Colour that transparent pictures are composited on (`white`, `#ff8000`); None:
            white.
        classnames_by: How the data's own class names find theirs in `classnames`: by `name`, or in
            `order`, whatever they are called.

    Returns:
        Items `{"image": RGB picture, "label": int}`; pictures are read when an item is asked for.

    Raises:
        ValueError: If the path, the split or a column does not exist.
        CalibrationError: If the data cannot be read, or a label is out of range.
    """
    check_classnames_by(classnames_by, f"data {path!r}")
    source = Path(path).expanduser()
    root = None
    try:
        if source.is_dir():
            rows = _folder(source, split)
        elif source.is_file():
            rows, root = _table(source, split), source.parent
        else:
            rows = _elsewhere(path, source, split)
    except PermissionError as error:
        raise CalibrationError(
            f"data {path!r} may not be read (permission denied: {error.filename}). Change its "
            "permissions."
        ) from error
    items = ImageItems(
        rows,
        place=f"data {path!r}" + (f", split {split!r}" if split else ""),
        image_column=image_column,
        label_column=label_column,
        classnames=classnames,
        root=root,
        background=background,
        classnames_by=classnames_by,
    )
    if root is not None:
        _check_files(rows, image_column, root, items.place)
    return items


def _elsewhere(path: str, source: Path, split: str | None) -> datasets.Dataset:
    if _looks_like_a_path(path):
        raise ValueError(
            f"data {path!r} does not exist: neither a file nor a folder at {source.absolute()}."
        )
    return _hub(path, split)


def _check_files(table: datasets.Dataset, column: str, root: Path, place: str) -> None:
    """Refuse a table with paths of files that are not there, before any of them is needed."""
    kind = table.features[column]
    if isinstance(kind, datasets.Image):
        structs = table.data.column(column).combine_chunks()
        held = structs.field("bytes").is_valid().to_pylist()
        paths = structs.field("path").to_pylist()
        paths = [None if inside else path for inside, path in zip(held, paths, strict=True)]
    elif kind == datasets.Value("string"):
        paths = table[column]
    else:
        return
    files = [None if path is None else root / Path(path).expanduser() for path in paths]
    missing = [i for i, file in enumerate(files) if file is not None and not os.path.lexists(file)]
    if missing:
        raise CalibrationError(
            f"{place}: {len(missing)} of {len(files)} image files do not exist; the first is item "
            f"{missing[0]}, {files[missing[0]]} (relative paths start at {root.absolute()}). "
            f"Correct the table or set image_column (now {column!r})."
        )


def _looks_like_a_path(path: str) -> bool:
    starts = path.startswith((".", "/", "~", "\\"))
    return starts or path.count("/") > 1 or Path(path).suffix.lower() in TABLE_READERS


def _folder(folder: Path, split: str | None) -> datasets.Dataset:
    if split is not None:
        if not (folder / split).is_dir():
            held = [entry.name for entry in _subfolders(folder)]
            raise ValueError(
                f"data {str(folder)!r} has no folder for split "
                f"{split!r}{nearest_hint(split, held)}. "
                f"Folders there: {', '.join(held) or 'none'}. Without split, all of it is taken."
            )
        folder = folder / split
    by_class = {entry.name: _image_files(entry) for entry in _subfolders(folder)}
    by_class = {name: by_class[name] for name in sort_names(by_class) if by_class[name]}
    if split is None and by_class and set(by_class) <= SPLIT_FOLDERS:
        raise ValueError(f"data {str(folder)!r} has splits: set split to {_or(by_class)}.")
    loose = [str(file) for file in sorted(folder.iterdir()) if _is_image(file)]
    if by_class and loose:
        raise ValueError(
            f"data {str(folder)!r} holds images ({Path(loose[0]).name}, ...) beside class folders "
            f"({_or(by_class)}): move them into class folders."
        )
    if not by_class and not loose:
        raise ValueError(
            f"data {str(folder)!r} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))}), "
            "neither in itself nor in class folders."
        )
    if loose:
        return datasets.Dataset.from_dict(
            {"image": loose}, features=datasets.Features({"image": datasets.Image()})
        )
    return _labelled_files(by_class)


def _labelled_files(by_class: dict[str, list[str]]) -> datasets.Dataset:
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(by_class))}
    )
    return datasets.Dataset.from_dict(
        {
            "image": [file for files in by_class.values() for file in files],
            "label": [name for name, files in by_class.items() for _ in files],
        },
        features=features,
    )


def _subfolders(folder: Path) -> list[Path]:
    return sorted(e for e in folder.iterdir() if e.is_dir() and not e.name.startswith("."))


def _is_image(file: Path) -> bool:
    hidden = file.name.startswith(".")
    return file.suffix.lower() in IMAGE_SUFFIXES and not hidden and file.is_file()


def _image_files(folder: Path) -> list[str]:
    def refuse(error: OSError) -> None:
        raise error  # a folder that may not be read would be left out in silence

    found = [
        Path(place) / name for place, _, names in os.walk(folder, onerror=refuse) for name in names
    ]
    return [str(file) for file in sorted(found) if _is_image(file)]


def _table(file: Path, split: str | None) -> datasets.Dataset:
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
    try:
        if reader == "csv":  # the reader of `datasets` leaves the file open
            return datasets.Dataset(pyarrow.csv.read_csv(file))
        loaded = datasets.load_dataset(reader, data_files=str(file), split="train")
    except Exception as error:  # the readers raise whatever their parsers raise
        cause = error.__cause__ or error
        if isinstance(cause, PermissionError):
            raise cause from error
        raise CalibrationError(
            f"data {str(file)!r} is not readable as {reader}: {cause}"
        ) from error
    return cast(datasets.Dataset, loaded)


def _hub(name: str, split: str | None) -> datasets.Dataset:
    if split is None:
        raise ValueError(
            f"data {name!r} is neither a file nor a folder here, so it is taken as the id of a hub "
            "data set, and a split is needed: set split (often train or test)."
        )
    try:
        loaded = datasets.load_dataset(name, split=split)
    except Exception as error:  # whatever the hub's client and the network raise
        raise CalibrationError(
            f"data {name!r}, split {split!r}: neither a file or folder here nor a data set that "
            f"the hub gives ({error}).{offline_hint()}"
        ) from error
    return cast(datasets.Dataset, loaded)


def offline_hint() -> str:
    """A sentence for messages about what cannot be loaded, empty where the hub may be asked."""
    if not HF_HUB_OFFLINE:
        return ""
    return " HF_HUB_OFFLINE is set: only local files and what is already in the cache are found."


def _or(names: Iterable[str]) -> str:
    return " or ".join(names)
