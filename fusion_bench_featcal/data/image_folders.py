"""Folders and tables of images as tables of the images' files, with labels if there are any."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import datasets

from fusion_bench_featcal.data.labels import sort_names
from fusion_bench_featcal.data.tables import is_saved, read_saved, read_table
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint
from fusion_bench_featcal.errors.plurals import counted
from fusion_bench_featcal.errors.words import word

log = logging.getLogger(__name__)

IMAGE_SUFFIXES = {
    ".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png",
    ".ppm", ".tga", ".tif", ".tiff", ".webp",
}  # fmt: skip
_FILE_NAME = "file_name"  # column of `imagefolder` with the paths of images
SPLIT_FOLDERS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


def check_column(table: datasets.Dataset, column: str, name: str) -> None:
    """Refuse a table without the column of images."""
    if column not in table.column_names:
        raise ValueError(
            f"{name}: no column {column!r} of images{nearest_hint(column, table.column_names)}; "
            f"there are: {', '.join(table.column_names)}. Name it by {word('image_column')}"
        )


def with_files(table: datasets.Dataset, root: Path, name: str, column: str) -> datasets.Dataset:
    """Return a table whose paths of images start at the folder `root`, after a check of them."""
    check_column(table, column, name)
    if table.features[column] != datasets.Value("string"):
        return table
    files = [None if path is None else root / Path(path).expanduser() for path in table[column]]
    for number, file in enumerate(files):
        if file is not None and not file.exists():
            raise CalibrationError(
                f"{name}, item {number}: there is no file {file} (relative paths start at "
                f"{root.absolute()}). Correct the table or {word('image_column')} (now {column!r})"
            )
    paths = [None if file is None else str(file) for file in files]
    return table.remove_columns(column).add_column(column, paths)  # type: ignore[call-arg]


def read_folder(
    root: Path, split: str | None, usual_split: str | None, image_column: str, label: str | None
) -> tuple[datasets.Dataset, str | None]:
    """Return a table of the images in a folder, and the split, None without splits."""
    if is_saved(root):
        return read_saved(root, split, usual_split), split
    if split is None:
        splits = {name for name, files in _class_folders(root).items() if files}
        if splits and splits <= SPLIT_FOLDERS:
            split = usual_split
            if split not in splits:
                names = " or ".join(sort_names(splits))
                raise ValueError(
                    f"data {str(root)!r} has splits: name one by {word('split')}, {names}"
                )
    folder = root if split is None else _split_folder(root, split)
    classes = {name: files for name, files in _class_folders(folder).items() if files}
    if folder != root and not classes and not _metadata(folder) and (file := _metadata(root)):
        raise ValueError(
            f"data {str(root)!r} has splits, and {file.name} beside them, which imagefolder does "
            f"not read: write the lines of each split to a {file.name} in its folder, such as "
            f"{folder.name}/{file.name}, with file_name from there"
        )
    if file := _metadata(folder):
        table = read_table(file, None, label)
        names = set(table.column_names)
        if image_column == "image" and _FILE_NAME in names and "image" not in names:
            table = table.rename_column(_FILE_NAME, "image")
        # Beside class folders it may have other things, such as captions.
        if not classes or {image_column, label or "label"} <= set(table.column_names):
            listed = with_files(table, folder, f"data {str(file)!r}", image_column)
            _warn_of_unlisted(folder, file, listed, image_column)
            return listed, split
    return _by_class(folder, classes), split


def _warn_of_unlisted(folder: Path, file: Path, table: datasets.Dataset, column: str) -> None:
    """Warn of images in a folder that its table does not have."""
    if table.features[column] != datasets.Value("string"):
        return
    listed = set(table[column])
    if unlisted := [image for image in _images(folder.rglob("*")) if image not in listed]:
        log.warning(
            "data %r: %s has no line for %s, such as %s, and leaves them out",
            str(folder), file.name, counted(len(unlisted), "image"), Path(unlisted[0]).name,
        )  # fmt: skip


def _metadata(folder: Path) -> Path | None:
    """Return the table of a folder's images, as `datasets` has it for `imagefolder`."""
    files = [folder / f"metadata.{ending}" for ending in ("csv", "jsonl", "parquet")]
    files = [file for file in files if file.is_file()]
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise ValueError(f"data {str(folder)!r} has {names}: leave one of them there")
    return files[0] if files else None


def _class_folders(folder: Path) -> dict[str, list[str]]:
    """Return the images in each subfolder."""
    folders = {e.name: e for e in folder.iterdir() if e.is_dir() and not e.name.startswith(".")}
    return {name: _images(folders[name].rglob("*")) for name in sort_names(folders)}


def _by_class(folder: Path, classes: Mapping[str, list[str]]) -> datasets.Dataset:
    """Return a table of the images of class folders, or of images alone."""
    data, alone, names = f"data {str(folder)!r}", _images(folder.iterdir()), " or ".join(classes)
    if classes and alone:
        raise ValueError(
            f"{data} has images ({Path(alone[0]).name}, ...) beside class folders ({names}): move "
            "them into class folders"
        )
    if not classes and not alone:
        suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
        raise ValueError(
            f"{data} has no images ({suffixes}), neither in itself nor in class folders"
        )
    if alone:
        return datasets.Dataset.from_dict({"image": alone})
    _refuse_outer_folder(folder, classes)
    images = [file for files in classes.values() for file in files]
    labels = [name for name, files in classes.items() for _ in files]
    return datasets.Dataset.from_dict({"image": images, "label": labels})


def _refuse_outer_folder(folder: Path, classes: Mapping[str, list[str]]) -> None:
    """Refuse a folder around that of the class folders, which would be the only class."""
    if len(classes) > 1:
        return
    outer = folder / next(iter(classes))
    inner = [name for name, files in _class_folders(outer).items() if files]
    if len(inner) > 1 and not _images(outer.iterdir()):
        raise ValueError(
            f"data {str(folder)!r} has one class ({outer.name}), whose images are in folders of "
            f"their own ({' or '.join(inner)}): if these are the classes, give {str(outer)!r}"
        )


def _split_folder(folder: Path, split: str) -> Path:
    splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if split not in splits:
        raise ValueError(
            f"data {str(folder)!r} has no folder for split {split!r}{nearest_hint(split, splits)}. "
            f"Folders: {', '.join(splits) or 'none'}"
        )
    return folder / split


def _images(entries: Iterable[Path]) -> list[str]:
    """Return the image files among entries of a folder, sorted."""
    return [
        str(file)
        for file in sorted(entries)
        if file.suffix.lower() in IMAGE_SUFFIXES and file.name[0] != "." and file.is_file()
    ]
