"""`ImageItems`: any data set as pictures; `load_images`: folders, tables and hub data sets."""

import os
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
from fusion_bench_featcal.data.pictures import Colour, parse_background, to_rgb
from fusion_bench_featcal.data.tables import from_hub, read_table, require_numbered
from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.settings import CalibrationError

IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
SPLIT_FOLDERS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


class ImageItems(torch.utils.data.Dataset[dict[str, Any]]):
    """Any data set as items `{"image": RGB picture, "label": int}`, read one by one when asked for.

    Labels of `datasets` tables are checked at once, those of other data sets as they are read.
    Without a label column the items have no label: enough for calibration, which uses none.

    Attributes:
        has_labels: True if items carry labels (None: unknown before an item is read).
    """

    def __init__(
        self,
        rows: Any,
        *,
        place: str,
        image_column: str = "image",
        label_column: str | None = "label",
        classnames: Sequence[str] | None = None,
        root: Path | None = None,
        background: str | None = None,
        classnames_by: str = "name",
    ) -> None:
        """See a `datasets` table or a map-style data set as items.

        `place` is its name in messages, and relative image paths start from `root` (None: the
        current folder). The other arguments are those of `load_images`; a background of None is
        that of `rows`, if they are items already.

        Raises:
            ValueError: If a column does not exist, or background or class names do not fit.
            CalibrationError: If `rows` has no length, or a label is no class.
        """
        require_numbered(rows, place)
        self.place = place
        self.classnames = None if classnames is None else list(classnames)
        self._image_column = image_column
        self._label_column = label_column
        self._classnames_by = classnames_by
        self.root = root
        self.background = parse_background(background, place)
        self._labels: list[int] | None = None
        self._rows = rows
        self.has_labels: bool | None = None if label_column is not None else False
        if isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom":
            self._read_table(rows)
        elif isinstance(rows, ImageItems):
            if background is None:
                self.background = rows.background
            self._adopt(rows)

    def _read_table(self, table: datasets.Dataset) -> None:
        if self._image_column not in table.column_names:
            hint = nearest_hint(self._image_column, table.column_names)
            raise ValueError(
                f"{self.place}: no image_column {self._image_column!r}{hint}. "
                f"Columns: {', '.join(table.column_names)}."
            )
        if isinstance(table.features[self._image_column], datasets.Image):
            # undecoded, so that a damaged file can be named
            table = table.cast_column(self._image_column, datasets.Image(decode=False))
        self._rows = table.select_columns([self._image_column]).with_format(None)
        self.has_labels = False
        if self._label_column is not None and self._label_column in table.column_names:
            names = getattr(table.features[self._label_column], "names", None)
            self._take_labels(list(table[self._label_column]), names)

    def _adopt(self, items: "ImageItems") -> None:
        """See what another view sees, possibly with class names of our own."""
        self.place = f"{self.place} ({items.place})"
        self.root, self._rows = items.root, items._rows
        self._image_column = items._image_column
        if self._label_column is None:
            return
        self.has_labels, self._label_column = items.has_labels, items._label_column
        if self.classnames is None:
            self.classnames = items.classnames
        if items._labels is not None:
            self._take_labels(items._labels, items.classnames)

    def _take_labels(self, values: Sequence[Any], names: Sequence[str] | None) -> None:
        self.has_labels = True
        self._labels, self.classnames = encode_labels(
            values, names, self.classnames, self.place, self._classnames_by
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.read(index)
        picture = {"image": to_rgb(image, *self.context(index))}
        return picture if label is None else picture | {"label": label}

    def read(self, index: int) -> tuple[Any, int | None]:
        """Image `index` as the data set holds it (see `to_rgb`), and its label if it has one.

        Raises:
            CalibrationError: If the item has no image, or a label that is no class.
        """
        try:
            item = self._rows[index]
        # data sets that decode pictures themselves
        except OSError as error:
            raise CalibrationError(f"{self.at(index)} cannot be read ({error}).") from error
        image, label = self._parts(item, index)
        if self._labels is not None:
            return image, self._labels[index]
        if label is None or self.has_labels is False or self._label_column is None:
            return image, None
        return image, label_index(label, self.classnames, self.at(index))

    def at(self, index: int) -> str:
        """Return the name of item `index` in messages."""
        return f"{self.place}, item {index}"

    def context(self, index: int) -> tuple[str, Path | None, Colour]:
        """Return place, root and background of item `index`, as `to_rgb` takes them."""
        return self.at(index), self.root, self.background

    def _parts(self, item: Any, index: int) -> tuple[Any, Any]:
        """Image and label of a mapping, of a tuple, or of an image alone."""
        if isinstance(item, Mapping):
            if self._image_column not in item:
                raise CalibrationError(
                    f"{self.at(index)} has no {self._image_column!r}; it has: "
                    f"{', '.join(map(str, item))}. Check image_column."
                )
            return item[self._image_column], item.get(self._label_column)
        if isinstance(item, tuple | list) and item:
            return item[0], item[1] if len(item) > 1 else None
        return item, None


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
        classnames_by: Rule to match the data's own class names to `classnames`: by `name`, or in
            `order`, whatever the names are.

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
            rows, root = read_table(source, split), source.parent
        else:
            rows = from_hub(path, source, split)
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
    held = {entry.name: _image_files(entry) for entry in _subfolders(folder)}
    by_class = {name: held[name] for name in sort_names(held) if held[name]}
    names = " or ".join(by_class)
    if split is None and by_class and set(by_class) <= SPLIT_FOLDERS:
        raise ValueError(f"data {str(folder)!r} has splits: set split to {names}.")
    loose = [str(file) for file in sorted(folder.iterdir()) if _is_image(file)]
    if by_class and loose:
        raise ValueError(
            f"data {str(folder)!r} holds images ({Path(loose[0]).name}, ...) beside class folders "
            f"({names}): move them into class folders."
        )
    if not by_class and not loose:
        raise ValueError(
            f"data {str(folder)!r} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))}), "
            "neither in itself nor in class folders."
        )
    files = loose or [file for files in by_class.values() for file in files]
    columns: dict[str, Any] = {"image": files}
    features: dict[str, Any] = {"image": datasets.Image()}
    if by_class:
        columns["label"] = [name for name, files in by_class.items() for _ in files]
        features["label"] = datasets.ClassLabel(names=list(by_class))
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def _subfolders(folder: Path) -> list[Path]:
    return sorted(e for e in folder.iterdir() if e.is_dir() and not e.name.startswith("."))


def _is_image(file: Path) -> bool:
    hidden = file.name.startswith(".")
    return file.suffix.lower() in IMAGE_SUFFIXES and not hidden and file.is_file()


def _image_files(folder: Path) -> list[str]:
    def refuse(error: OSError) -> None:
        raise error  # a folder that may not be read would be left out in silence

    files = [
        Path(place) / name for place, _, names in os.walk(folder, onerror=refuse) for name in names
    ]
    return [str(file) for file in sorted(files) if _is_image(file)]
