"""`ImageItems`: any dataset as pictures. `load_images`: folders, tables and hub datasets."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image

from fusion_bench_featcal.data.labels import class_numbers, encode_labels, sort_names
from fusion_bench_featcal.data.pictures import to_rgb
from fusion_bench_featcal.data.tables import from_hub, read_table, require_numbered
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint

IMAGE_SUFFIXES = {
    ".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png",
    ".ppm", ".tga", ".tif", ".tiff", ".webp",
}  # fmt: skip
Change = Callable[[Image.Image, int], Image.Image]

SPLIT_FOLDERS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


class ImageItems(torch.utils.data.Dataset[dict[str, Any]]):
    """View of a dataset as items `{"image": RGB picture, "label": int}`, read one by one.

    Labels of `datasets` tables are checked on construction, other labels when they are read.

    Attributes:
        name: Name of the dataset in messages.
        classnames: Class names by number, if there are any.
        has_labels: False if there are certainly no labels.
    """

    _values: tuple[Sequence[Any], Sequence[str] | None] | None = None  # labels, and their names

    def __init__(
        self,
        rows: Any,
        *,
        name: str,
        image_column: str = "image",
        label_column: str | None = "label",
        classnames: Sequence[str] | None = None,
    ) -> None:
        """View a `datasets` table, or a dataset of mappings or tuples (image, label).

        For further arguments see `load_images`.

        Raises:
            ValueError: If the column of the images does not exist.
            CalibrationError: If `rows` has no length or several splits, or a label is not a class.
        """
        require_numbered(rows, name)
        self.name, self.classnames = name, None if classnames is None else list(classnames)
        self.has_labels, self._labels = label_column is not None, None
        self._rows, self._image_column, self._label_column = rows, image_column, label_column
        self._changes: tuple[Change, ...] = ()
        if isinstance(rows, ImageItems):
            self._view(rows)
        elif isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom":
            self._read_table(rows)
        if self.has_labels and self._values is not None:
            values, names = self._values
            self._labels, self.classnames = encode_labels(values, names, self.classnames, self.name)

    def _read_table(self, table: datasets.Dataset) -> None:
        column, label = self._image_column, self._label_column
        _check_column(table, column, self.name)
        if isinstance(table.features[column], datasets.Image):
            # undecoded, so that messages can name a damaged file
            table = table.cast_column(column, datasets.Image(decode=False))
        self._rows = table.select_columns([column]).with_format(None)
        self.has_labels = label is not None and label in table.column_names
        if label is not None and self.has_labels:
            names = getattr(table.features[label], "names", None)
            self._values = list(table.with_format(None)[label]), names

    def _view(self, items: "ImageItems") -> None:
        """View the rows of other items, possibly with other class names."""
        self.name = f"{self.name} ({items.name})"
        self._rows, self._changes, self._values = items._rows, items._changes, items._values
        self._image_column, self._label_column = items._image_column, items._label_column
        self.has_labels = self.has_labels and items.has_labels
        self.classnames = self.classnames or items.classnames

    def changed(self, change: Change) -> "ImageItems":
        """Return the items with pictures changed by a function of picture and position."""
        items = copy.copy(self)
        items._changes = (*self._changes, change)
        return items

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        stored, label = self.read(index)
        item = {"image": self.picture(stored, index)}
        return item if label is None else item | {"label": label}

    def read(self, index: int) -> tuple[Any, int | None]:
        """Return image `index` as the dataset stores it, for `picture`, and its label if any.

        Raises:
            CalibrationError: If the item has no image, or a label that is not a class.
        """
        try:
            item = self._rows[index]
        except OSError as error:  # from a dataset that decodes pictures
            raise CalibrationError(f"{self.at(index)} cannot be read ({error})") from error
        if isinstance(item, Mapping):
            if self._image_column not in item:
                raise CalibrationError(
                    f"{self.at(index)} has no {self._image_column!r}; it has: "
                    f"{', '.join(map(str, item))}. Check image_column"
                )
            item = item[self._image_column], item.get(self._label_column)
        image, label, *_ = (*item, None) if isinstance(item, tuple | list) else (item, None)
        if self._labels is not None:
            return image, self._labels[index]
        if label is None or not self.has_labels:
            return image, None
        (number,) = class_numbers([label], self.classnames, lambda _: self.at(index))
        return image, number

    def picture(self, stored: Any, index: int) -> Image.Image:
        """Return the RGB picture of a stored image.

        Raises:
            CalibrationError: If it cannot be read, naming its file.
        """
        picture = to_rgb(stored, self.at(index))
        for change in self._changes:
            picture = change(picture, index)
        return picture

    def at(self, index: int) -> str:
        """Return the name of item `index` in messages."""
        return f"{self.name}, item {index}"


def load_images(
    path: str,
    split: str | None = None,
    image_column: str = "image",
    label_column: str | None = "label",
    classnames: Sequence[str] | None = None,
) -> ImageItems:
    """Load pictures from a folder, a table or the hub, without running code of a dataset.

    - A folder has one subfolder of images per class, or only images, which are then unlabeled. If
      it has a folder per split (`train`, `test`), set `split`.
    - A table (`.jsonl`, `.csv`, `.parquet`) has paths, relative to its folder, or images in
      `image_column`, and integers or class names in `label_column`, if it exists.
    - Anything else is the id of a hub dataset. `split` is required.

    Args:
        path: The folder, the table or the hub id. Relative paths start at the current folder.
        split: The split, if there are several.
        image_column: Column of the images.
        label_column: Column of the labels. If it is missing or None, the items are unlabeled.
        classnames: Class names by number. Names of folders, texts and the dataset's own names are
            found among them. By default these are the class names, sorted unless the dataset
            numbers them.

    Returns:
        Items `{"image": RGB picture, "label": int}`. A picture is read when its item is used.

    Raises:
        ValueError: If the path, the split or a column does not exist.
        CalibrationError: If the data cannot be read, or a label is not a class.
    """
    name = f"data {path!r}" + (f", split {split!r}" if split else "")
    source = Path(path).expanduser()
    if source.is_dir():
        rows = _read_folder(source, split)
    elif source.is_file():
        table = read_table(source, split, label_column)
        rows = _with_files(table, source.parent, name, image_column)
    else:
        rows = from_hub(path, source, split)
    return ImageItems(
        rows,
        name=name,
        image_column=image_column,
        label_column=label_column,
        classnames=classnames,
    )


def _check_column(table: datasets.Dataset, column: str, name: str) -> None:
    if column not in table.column_names:
        raise ValueError(
            f"{name}: no column {column!r} of images{nearest_hint(column, table.column_names)}; "
            f"there are: {', '.join(table.column_names)}. Name it (image_column of load_images or "
            "of a task, --columns image=NAME)"
        )


def _with_files(table: datasets.Dataset, root: Path, name: str, column: str) -> datasets.Dataset:
    """Return a table whose paths of images start at the folder `root`, after a check of them."""
    _check_column(table, column, name)
    if table.features[column] != datasets.Value("string"):
        return table
    files = [None if path is None else root / Path(path).expanduser() for path in table[column]]
    for number, file in enumerate(files):
        if file is not None and not file.exists():
            raise CalibrationError(
                f"{name}, item {number}: there is no file {file} (relative paths start at "
                f"{root.absolute()}). Correct the table or set image_column (now {column!r})"
            )
    paths = [None if file is None else str(file) for file in files]
    return table.remove_columns(column).add_column(column, paths)  # type: ignore[call-arg]


def _read_folder(folder: Path, split: str | None) -> datasets.Dataset:
    """Return a table of the images in a folder, with the names of class folders as labels."""
    if split is not None:
        folder = _split_folder(folder, split)
    data = f"data {str(folder)!r}"
    folders = {e.name: e for e in folder.iterdir() if e.is_dir() and not e.name.startswith(".")}
    classes = {name: _images(folders[name].rglob("*")) for name in sort_names(folders)}
    classes = {name: files for name, files in classes.items() if files}
    alone, names = _images(folder.iterdir()), " or ".join(classes)
    if split is None and classes and set(classes) <= SPLIT_FOLDERS:
        raise ValueError(f"{data} has splits: set split to {names}")
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
    images = [file for files in classes.values() for file in files]
    labels = [name for name, files in classes.items() for _ in files]
    return datasets.Dataset.from_dict({"image": images, "label": labels})


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
