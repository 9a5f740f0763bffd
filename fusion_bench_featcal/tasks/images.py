"""Pictures as data sets hold them, and a view of any data set as picture and label."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tasks.colours import (
    WHITE,
    Colour,
    array_picture,
    grey_scale,
    parse_background,
    to_eight_bits,
)
from fusion_bench_featcal.tasks.labels import encode_labels, label_index


def to_rgb(
    value: Any, place: str, root: Path | None = None, background: Colour = WHITE
) -> Image.Image:
    """Turn what a data set calls an image into an RGB picture of 8 bits.

    Args:
        value: A PIL image, a path, the bytes of an image file, a mapping with `bytes` or `path`
            (how `datasets` keeps images), or an array or tensor that `array_picture` takes.
        place: The item, for messages.
        root: Folder that relative paths start from (None: the current one).
        background: Colour that transparent pictures are composited on.

    Returns:
        The picture in mode RGB, turned upright where the file says how it was held. Grey values of
        more than 8 bits are scaled by their file's range.

    Raises:
        CalibrationError: If it is no image, its file is missing or damaged (naming the file), or
            the range of its values cannot be told.
    """
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        data, path = value.get("bytes"), value.get("path")
        if data or path is None:
            return _open(data or b"", path, place, root, background)
        return to_rgb(path, place, root, background)
    if isinstance(value, str | Path):
        return _open(None, value, place, root, background)
    if isinstance(value, bytes):
        return _open(value, None, place, root, background)
    try:
        if isinstance(value, np.ndarray | torch.Tensor):
            value = array_picture(value)
        if isinstance(value, Image.Image):
            scale = grey_scale(value)
            return to_eight_bits(ImageOps.exif_transpose(value), scale, background)
    # PIL reports what it cannot convert by any of these; its images may still be unread
    except (OSError, SyntaxError, ValueError) as error:
        raise CalibrationError(f"{place}: the picture cannot be read: {error}.") from error
    raise CalibrationError(
        f"{place}: not an image but {type(value).__name__} ({str(value)[:60]!r}). Check "
        "image_column."
    )


def _open(
    data: bytes | None, path: str | Path | None, place: str, root: Path | None, background: Colour
) -> Image.Image:
    file = None if path is None else (root or Path()) / Path(path).expanduser()
    name = f"image file {file}" if file is not None else "image"
    try:
        content = file.read_bytes() if data is None and file is not None else data
        if not content:
            raise CalibrationError(f"{place}: {name} is empty. Repair or remove it.")
        with Image.open(io.BytesIO(content)) as opened:
            opened.load()
            scale = grey_scale(opened)
            return to_eight_bits(ImageOps.exif_transpose(opened), scale, background)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CalibrationError(
            f"{place}: {name} does not exist (relative paths start at {root or Path.cwd()})."
        ) from error
    except UnidentifiedImageError as error:
        raise CalibrationError(
            f"{place}: {name} cannot be read (no image format that PIL knows). Repair or remove it."
        ) from error
    # PIL reports damaged files by any of these
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = unreadable_reason(error) or f"cannot be read ({error}). Repair or remove it"
        raise CalibrationError(f"{place}: {name} {reason}.") from error


def unreadable_reason(error: Exception) -> str | None:
    """Say why an existing path cannot be read; None where the error tells nothing of the kind."""
    if isinstance(error, PermissionError):
        return "may not be read (permission denied). Change its permissions"
    if isinstance(error, IsADirectoryError):
        return "is a folder, not a file. Name the file"
    return None


class ImageItems(torch.utils.data.Dataset[dict[str, Any]]):
    """Any data set as items `{"image": RGB picture, "label": int}`, read one by one when asked for.

    Labels of `datasets` tables are checked at once, those of other data sets as they are read.
    Without a label column the items have no label: enough for calibration, which uses none.

    Attributes:
        place: What the data set is called in messages.
        root: Folder that relative image paths start from (None: the current one).
        background: Colour that transparent pictures are composited on.
        classnames: Class names by label, where they are known.
        has_labels: Whether items carry labels (None: unknown before an item is read).
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
        """See a data set as items.

        Args:
            rows: A `datasets` table or a map-style data set.
            place: What to call it in messages.
            image_column: Name of the images' column.
            label_column: Name of the labels' column; None: items have no labels.
            classnames: Class names by label.
            root: Folder that relative image paths start from.
            background: Colour that transparent pictures are composited on; None: that of `rows`,
                else white.
            classnames_by: How the data's class names and `classnames` are matched (`match_names`).

        Raises:
            ValueError: If a column does not exist, or background or class names do not fit.
            CalibrationError: If `rows` has no length, or a label is no class.
        """
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise CalibrationError(
                f"{place}: a data set with a length and numbered items is needed, got "
                f"{type(rows).__name__}. Load it without streaming."
            )
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
        picture = {"image": to_rgb(image, self.at(index), self.root, self.background)}
        return picture if label is None else picture | {"label": label}

    def read(self, index: int) -> tuple[Any, int | None]:
        """Image `index` as the data set holds it (see `to_rgb`), and its label if it has one.

        Raises:
            CalibrationError: If the item has no image, or a label that is no class.
        """
        item = self._item(index)
        image = self._image(item, index)
        if self._labels is not None:
            return image, self._labels[index]
        label = self._label(item)
        if label is None:
            return image, None
        return image, label_index(label, self.classnames, self.at(index))

    def at(self, index: int) -> str:
        """What item `index` is called in messages."""
        return f"{self.place}, item {index}"

    def _item(self, index: int) -> Any:
        try:
            return self._rows[index]
        # data sets that decode pictures themselves
        except OSError as error:
            raise CalibrationError(f"{self.at(index)} cannot be read ({error}).") from error

    def _image(self, item: Any, index: int) -> Any:
        if isinstance(item, Mapping):
            if self._image_column not in item:
                raise CalibrationError(
                    f"{self.at(index)} has no {self._image_column!r}; it has: "
                    f"{', '.join(map(str, item))}. Check image_column."
                )
            return item[self._image_column]
        return item[0] if isinstance(item, tuple | list) and item else item

    def _label(self, item: Any) -> Any:
        if self.has_labels is False or self._label_column is None:
            return None
        if isinstance(item, Mapping):
            return item.get(self._label_column)
        return item[1] if isinstance(item, tuple | list) and len(item) > 1 else None
