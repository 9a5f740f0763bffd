"""Pictures as data sets hold them, and a view of any data set as picture and label."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image, ImageOps

from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tasks.labels import encode_labels, label_index
from fusion_bench_featcal.tasks.names import nearest_hint


def to_rgb(value: Any, place: str, root: Path | None = None) -> Image.Image:
    """Turn what a data set calls an image into an RGB picture.

    Args:
        value: A PIL image, a path, the bytes of an image file, a mapping with `bytes` or `path`
            (how `datasets` keeps images), or a uint8 array or tensor `[height, width]` or
            `[height, width, 3]`.
        place: The item, for messages.
        root: Folder that relative paths start from (None: the current one).

    Returns:
        The picture in mode RGB, turned upright where the file says how it was held.

    Raises:
        CalibrationError: If it is no image, or its file is missing or damaged (naming the file).
    """
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        data, path = value.get("bytes"), value.get("path")
        return _open(data, path, place, root) if data else to_rgb(path, place, root)
    if isinstance(value, Image.Image):
        return _converted(value, "picture", place)
    if isinstance(value, str | Path):
        return _open(None, value, place, root)
    if isinstance(value, bytes):
        return _open(value, None, place, root)
    if isinstance(value, np.ndarray | torch.Tensor):
        return _from_array(value, place)
    raise CalibrationError(
        f"{place}: not an image but {type(value).__name__} ({str(value)[:60]!r}). Check "
        "image_column."
    )


def _open(
    data: bytes | None, path: str | Path | None, place: str, root: Path | None
) -> Image.Image:
    file = None if path is None else (root or Path()) / Path(path).expanduser()
    name = f"image file {file}" if file is not None else "image"
    try:
        with Image.open(io.BytesIO(data) if data else file) as opened:  # type: ignore[arg-type]
            opened.load()
            return _converted(ImageOps.exif_transpose(opened), name, place)
    except FileNotFoundError as error:
        raise CalibrationError(
            f"{place}: {name} does not exist (relative paths start at {root or Path.cwd()})."
        ) from error
    # PIL reports damaged files by any of these
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CalibrationError(
            f"{place}: {name} cannot be read ({error}). Repair or remove it."
        ) from error


def _converted(picture: Image.Image, name: str, place: str) -> Image.Image:
    try:
        return picture.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # a PIL image may still be unread
        raise CalibrationError(f"{place}: {name} cannot be read ({error}).") from error


def _from_array(value: np.ndarray | torch.Tensor, place: str) -> Image.Image:
    array = value.numpy(force=True) if isinstance(value, torch.Tensor) else value
    grey_or_rgb = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
    if array.dtype != np.uint8 or not grey_or_rgb:
        raise CalibrationError(
            f"{place}: an image array must be uint8 [height, width] or [height, width, 3], got "
            f"{array.dtype} {list(array.shape)}. Give such arrays, or a callable as processor."
        )
    return Image.fromarray(array).convert("RGB")


class ImageItems(torch.utils.data.Dataset[dict[str, Any]]):
    """Any data set as items `{"image": RGB picture, "label": int}`, read one by one when asked for.

    Labels of `datasets` tables are checked at once, those of other data sets as they are read.
    Without a label column the items have no label: enough for calibration, which uses none.

    Attributes:
        place: What the data set is called in messages.
        root: Folder that relative image paths start from (None: the current one).
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
    ) -> None:
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise CalibrationError(
                f"{place}: a data set with a length and numbered items is needed, got "
                f"{type(rows).__name__}. Load it without streaming."
            )
        self.place = place
        self.classnames = None if classnames is None else list(classnames)
        self._image_column = image_column
        self._label_column = label_column
        self.root = root
        self._labels: list[int] | None = None
        self._rows = rows
        self.has_labels: bool | None = None if label_column is not None else False
        if isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom":
            self._read_table(rows)
        elif isinstance(rows, ImageItems):
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
        self._labels, self.classnames = encode_labels(values, names, self.classnames, self.place)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.read(index)
        picture = {"image": to_rgb(image, self.at(index), self.root)}
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
        except OSError as error:  # data sets that decode pictures themselves
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
