"""`ImageItems`: any dataset as pictures. `load_images`: folders, tables and hub datasets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch

from fusion_bench_featcal.data.labels import (
    check_classnames_by,
    encode_labels,
    label_index,
    sort_names,
)
from fusion_bench_featcal.data.pictures import to_rgb
from fusion_bench_featcal.data.tables import from_hub, read_table, require_numbered
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint

IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
SPLIT_FOLDERS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


class ImageItems(torch.utils.data.Dataset[dict[str, Any]]):
    """View of a dataset as items `{"image": RGB picture, "label": int}`, read one by one.

    Labels of `datasets` tables are checked on construction, other labels when they are read.

    Attributes:
        name: Name of the dataset in messages.
        classnames: Class names by label, if there are any.
        has_labels: Whether items have labels, or None if unknown before an item is read.
    """

    def __init__(
        self,
        rows: Any,
        *,
        name: str,
        image_column: str = "image",
        label_column: str | None = "label",
        classnames: Sequence[str] | None = None,
        classnames_by: str = "name",
    ) -> None:
        """View a `datasets` table, a map-style dataset or other items.

        For further arguments see `load_images`.

        Raises:
            ValueError: If a column does not exist, or class names do not fit.
            CalibrationError: If `rows` has no length or several splits, or a label is not a class.
        """
        require_numbered(rows, name)
        self.name, self.classnames = name, None if classnames is None else list(classnames)
        self.has_labels: bool | None = None if label_column is not None else False
        self._rows, self._image_column, self._label_column = rows, image_column, label_column
        self._labels: list[int] | None = None
        if isinstance(rows, ImageItems):
            self._view(rows, classnames_by)
        elif isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom":
            self._read_table(rows, classnames_by)

    def _read_table(self, table: datasets.Dataset, classnames_by: str) -> None:
        _check_column(table, self._image_column, self.name)
        if isinstance(table.features[self._image_column], datasets.Image):
            # undecoded, so that messages can name a damaged file
            table = table.cast_column(self._image_column, datasets.Image(decode=False))
        self._rows = table.select_columns([self._image_column]).with_format(None)
        self.has_labels = False
        if self._label_column is not None and self._label_column in table.column_names:
            names = getattr(table.features[self._label_column], "names", None)
            self._set_labels(list(table[self._label_column]), names, classnames_by)

    def _view(self, items: "ImageItems", classnames_by: str) -> None:
        """View the rows of other items, possibly with other class names."""
        self.name = f"{self.name} ({items.name})"
        self._rows, self._image_column = items._rows, items._image_column
        if self._label_column is None:
            return
        self.has_labels, self._label_column = items.has_labels, items._label_column
        self.classnames = self.classnames or items.classnames
        if items._labels is not None:
            self._set_labels(items._labels, items.classnames, classnames_by)

    def _set_labels(self, values: Sequence[Any], names: Sequence[str] | None, by: str) -> None:
        self.has_labels = True
        self._labels, self.classnames = encode_labels(values, names, self.classnames, self.name, by)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.read(index)
        picture = {"image": to_rgb(image, self.at(index))}
        return picture if label is None else picture | {"label": label}

    def read(self, index: int) -> tuple[Any, int | None]:
        """Return image `index` as the dataset stores it (see `to_rgb`), and its label if any.

        Raises:
            CalibrationError: If the item has no image, or a label that is not a class.
        """
        try:
            item = self._rows[index]
        except OSError as error:  # from a dataset that decodes pictures
            raise CalibrationError(f"{self.at(index)} cannot be read ({error}).") from error
        if isinstance(item, Mapping):
            if self._image_column not in item:
                raise CalibrationError(
                    f"{self.at(index)} has no {self._image_column!r}; it has: "
                    f"{', '.join(map(str, item))}. Check image_column."
                )
            item = item[self._image_column], item.get(self._label_column)
        values = tuple(item) if isinstance(item, tuple | list) and item else (item,)
        image, label, *_ = (*values, None)
        if self._labels is not None:
            return image, self._labels[index]
        if label is None or self.has_labels is False:
            return image, None
        return image, label_index(label, self.classnames, self.at(index))

    def at(self, index: int) -> str:
        """Return the name of item `index` in messages."""
        return f"{self.name}, item {index}"


def load_images(
    path: str,
    split: str | None = None,
    image_column: str = "image",
    label_column: str | None = "label",
    classnames: Sequence[str] | None = None,
    classnames_by: str = "name",
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
        classnames: Class names by label. By default the folders' names, the dataset's class names,
            or the distinct text labels in alphabetical (numbers: numerical) order.
        classnames_by: Rule that matches the dataset's class names to `classnames`: by `name`, or in
            `order`.

    Returns:
        Items `{"image": RGB picture, "label": int}`. A picture is read when its item is used.

    Raises:
        ValueError: If the path, the split or a column does not exist.
        CalibrationError: If the data cannot be read, or a label is out of range.
    """
    check_classnames_by(classnames_by, f"data {path!r}")
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
        classnames_by=classnames_by,
    )


def _check_column(table: datasets.Dataset, column: str, name: str) -> None:
    if column not in table.column_names:
        raise ValueError(
            f"{name}: no image_column {column!r}{nearest_hint(column, table.column_names)}. "
            f"Columns: {', '.join(table.column_names)}."
        )


def _with_files(table: datasets.Dataset, root: Path, name: str, column: str) -> datasets.Dataset:
    """Return a table whose paths of images start at the folder `root`, after a check of them."""
    _check_column(table, column, name)
    if table.features[column] != datasets.Value("string"):
        return table
    files = [None if path is None else root / Path(path).expanduser() for path in table[column]]
    missing = [i for i, file in enumerate(files) if file is not None and not file.exists()]
    if missing:
        raise CalibrationError(
            f"{name}: {len(missing)} of {len(files)} image files do not exist; the first is item "
            f"{missing[0]}, {files[missing[0]]} (relative paths start at {root.absolute()}). "
            f"Correct the table or set image_column (now {column!r})."
        )
    paths = [None if file is None else str(file) for file in files]
    return table.remove_columns(column).add_column(column, paths)  # type: ignore[call-arg]


def _read_folder(folder: Path, split: str | None) -> datasets.Dataset:
    if split is not None:
        folder = folder / split
        if not folder.is_dir():
            splits = [e.name for e in sorted(folder.parent.iterdir()) if e.is_dir()]
            raise ValueError(
                f"data {str(folder.parent)!r} has no folder for split "
                f"{split!r}{nearest_hint(split, splits)}. Folders: {', '.join(splits) or 'none'}."
            )
    folders = {e.name: e for e in folder.iterdir() if e.is_dir() and not e.name.startswith(".")}
    classes = {name: _images(folders[name].rglob("*")) for name in sort_names(folders)}
    classes = {name: files for name, files in classes.items() if files}
    names, files = " or ".join(classes), _images(folder.iterdir())
    if split is None and classes and set(classes) <= SPLIT_FOLDERS:
        raise ValueError(f"data {str(folder)!r} has splits: set split to {names}.")
    if classes and files:
        raise ValueError(
            f"data {str(folder)!r} has images ({Path(files[0]).name}, ...) beside class folders "
            f"({names}): move them into class folders."
        )
    if not classes and not files:
        raise ValueError(
            f"data {str(folder)!r} has no images ({', '.join(sorted(IMAGE_SUFFIXES))}), neither in "
            "itself nor in class folders."
        )
    columns: dict[str, Any] = {"image": files}
    features: dict[str, Any] = {"image": datasets.Image()}
    if classes:
        columns["image"] = [file for files in classes.values() for file in files]
        columns["label"] = [name for name, files in classes.items() for _ in files]
        features["label"] = datasets.ClassLabel(names=list(classes))
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def _images(entries: Any) -> list[str]:
    """Return the image files among entries of a folder, sorted."""
    return [
        str(file)
        for file in sorted(entries)
        if file.suffix.lower() in IMAGE_SUFFIXES and file.name[0] != "." and file.is_file()
    ]
