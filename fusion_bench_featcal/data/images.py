"""`ImageItems`: any dataset as pictures. `load_images`: folders, tables and hub datasets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image

from fusion_bench_featcal.data.image_folders import read_folder, with_files
from fusion_bench_featcal.data.labels import class_indices, encode_labels
from fusion_bench_featcal.data.pictures import digest_image, read_image, refuse_depth
from fusion_bench_featcal.data.tables import (
    load_from_hub,
    read_table,
    require_indexable,
    split_location,
)
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint
from fusion_bench_featcal.errors.words import user_term

PictureChange = Callable[[Image.Image, int], Image.Image]


class ImageItems(torch.utils.data.Dataset[dict[str, Any]]):
    """View of a dataset as items `{"image": RGB picture, "label": int}`, which are read one by one.

    Labels of `datasets` tables are checked on construction, other labels when they are read.

    Attributes:
        name: Name of the dataset in messages.
        classnames: Class names by index, or None.
        has_labels: False if the dataset certainly has no labels.
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
        change: PictureChange | None = None,
    ) -> None:
        """View a `datasets` table, or a dataset of mappings or tuples (image, label).

        Pictures are changed by `change`, a function of picture and position. For further arguments
        see `load_images`.

        Raises:
            ValueError: If the column of the images does not exist.
            CalibrationError: If `rows` has no length or several splits, or a label is not a class.
        """
        require_indexable(rows, name)
        self.name, self.classnames = name, None if classnames is None else list(classnames)
        self.has_labels, self._labels = label_column is not None, None
        self._rows, self._image_column, self._label_column = rows, image_column, label_column
        self._changes = () if change is None else (change,)
        if isinstance(rows, ImageItems):  # possibly with other class names
            self.name = f"{name} ({rows.name})"
            self._rows, self._values = rows._rows, rows._values
            self._changes = (*rows._changes, *self._changes)
            self._image_column, self._label_column = rows._image_column, rows._label_column
            self.has_labels = self.has_labels and rows.has_labels
            self.classnames = self.classnames or rows.classnames
        elif isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom":
            self._read_table(rows)
        if self.has_labels and self._values is not None:
            values, names = self._values
            self._labels, self.classnames = encode_labels(values, names, self.classnames, self.name)

    def _read_table(self, table: datasets.Dataset) -> None:
        column, label = self._image_column, self._label_column
        if column not in table.column_names:
            hint = nearest_hint(column, table.column_names)
            raise ValueError(
                f"{self.name}: no image column {column!r}{hint}; the columns are: "
                f"{', '.join(table.column_names)}. Name it with "
                f"{user_term('image_column')}"
            )
        if isinstance(table.features[column], datasets.Image):
            # undecoded, so that messages can name a damaged file
            table = table.cast_column(column, datasets.Image(decode=False))
        self._rows = table.select_columns([column]).with_format(None)
        self.has_labels = label is not None and label in table.column_names
        if label is not None and self.has_labels:
            names = getattr(table.features[label], "names", None)
            self._values = list(table.with_format(None)[label]), names

    @property
    def labels(self) -> Sequence[int]:
        """The labels of a table, which needs no images. Empty for other datasets."""
        return self._labels or ()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        stored, label = self.read(index)
        item = {"image": self.picture(stored, index)}
        return item if label is None else item | {"label": label}

    def read(self, index: int) -> tuple[Any, int | None]:
        """Return image `index` as the dataset stores it, for `picture`, and its label or None.

        Raises:
            CalibrationError: If the item has no image, or a label that is not a class.
        """
        try:
            item = self._rows[index]
        except OSError as error:  # from a dataset that decodes pictures
            raise CalibrationError(f"{self.row_name(index)} cannot be read ({error})") from error
        if isinstance(item, Mapping):
            if self._image_column not in item:
                raise CalibrationError(
                    f"{self.row_name(index)} has no {self._image_column!r}; it has: "
                    f"{', '.join(map(str, item))}. Check {user_term('image_column')}"
                )
            item = item[self._image_column], item.get(self._label_column)
        image, label, *_ = (*item, None) if isinstance(item, tuple | list) else (item, None)
        if self._labels is not None:
            return image, self._labels[index]
        if label is None or not self.has_labels:
            return image, None
        (number,) = class_indices(
            [label], self.classnames, lambda _: self.row_name(index), are_own=True
        )
        return image, number

    def check(self, indices: Iterable[int]) -> None:
        """Refuse images whose headers show that they cannot be used. No pixels are read.

        Raises:
            CalibrationError: If an image cannot be used. The message names its file.
        """
        for index in indices:
            read_image(self.read(index)[0], self.row_name(index), refuse_depth)

    def digest(self, index: int) -> bytes:
        """Return a digest of a stored image, to find repeated images."""
        return digest_image(self.read(index)[0])

    def picture(self, stored: object, index: int) -> Image.Image:
        """Return the RGB picture of a stored image.

        Raises:
            CalibrationError: If it cannot be read. The message names its file.
        """
        picture = read_image(stored, self.row_name(index))
        for change in self._changes:
            picture = change(picture, index)
        return picture

    def row_name(self, index: int) -> str:
        """Return the name of example `index` in messages."""
        return f"{self.name}, example {index}"


def load_images(
    path: str,
    split: str | None = None,
    image_column: str = "image",
    label_column: str | None = "label",
    classnames: Sequence[str] | None = None,
    *,
    usual_split: str | None = None,
) -> ImageItems:
    """Load pictures from a folder, a table or the hub, without running code of a dataset.

    - A folder has one subfolder of images per class, or only images, which are then unlabeled. A
      `metadata.csv` or `metadata.jsonl` in it, as of `imagefolder`, is a table of its images, with
      `file_name` in place of `image_column`. It may have a folder per split (`train`, `test`), or
      be written by `save_to_disk`.
    - A table (`.jsonl`, `.csv`, `.parquet`) has paths, relative to its folder, or images in
      `image_column`, and integers or class names in `label_column`, if it exists.
    - Anything else is the id of a hub dataset.

    Args:
        path: The folder, the table or the hub id. Relative paths start at the current folder.
            Folders and ids may end in `:SPLIT`.
        split: The split, if there are several.
        image_column: Column of the images.
        label_column: Column of the labels. If it is missing or None, the items are unlabeled.
        classnames: Class names by index, among which folders, texts and the dataset's own names are
            looked up. By default the names in the data, in the dataset's order or sorted.
        usual_split: The split if none is named and there are several.

    Returns:
        Items `{"image": RGB picture, "label": int}`. A picture is read when its item is used.

    Raises:
        ValueError: If the path, the split or a column does not exist.
        CalibrationError: If the data cannot be read, or a label is not a class.
    """
    if split is None:
        path, split = split_location(path)
    source = Path(path).expanduser()
    if source.is_dir():
        rows, split = read_folder(source, split, usual_split, image_column, label_column)
    elif not source.is_file():
        split = split or usual_split
        rows = load_from_hub(path, source, split)
    else:
        rows = with_files(read_table(source, split, label_column), source.parent, image_column)
    name = f"data {path!r}" + (f", split {split!r}" if split else "")
    return ImageItems(
        rows,
        name=name,
        image_column=image_column,
        label_column=label_column,
        classnames=classnames,
    )
