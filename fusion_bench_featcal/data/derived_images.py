"""Calibration data made from other data sets, or from nothing; YAML names them by `_target_`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from fusion_bench_featcal.data.corruptions import check_corruption, corrupt, random_of
from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.tables import require_numbered
from fusion_bench_featcal.setting_checks import integer, nullable
from fusion_bench_featcal.settings import CalibrationError

Rows = torch.utils.data.Dataset[dict[str, Any]]


class CorruptedImages(Rows):
    """The items of a data set with corrupted images: `{"image": RGB picture, ...}`."""

    def __init__(
        self, items: ImageItems, corruption: str, severity: int, seed: int, task: str,
        size: int | None,
    ) -> None:  # fmt: skip
        """Keep what `corrupted` has checked."""
        self.items = items
        self.background = items.background
        self._change = corruption, severity
        self._seed, self._task, self._size = seed, task, size

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.items[index]
        picture = item["image"]
        if self._size is not None:
            scale = self._size / min(picture.size)
            picture = ImageOps.scale(picture, scale, Image.Resampling.BICUBIC)
        random = random_of(self._seed, self._task, index)
        return item | {"image": corrupt(picture, *self._change, random)}


def corrupted(
    data: Any,
    corruption: str,
    severity: int = 3,
    seed: int = 42,
    task: str = "",
    size: int | None = None,
    split: str | None = None,
    image_column: str = "image",
) -> CorruptedImages:
    """Corrupt the images of a data set as ImageNet-C (see `data/corruptions.py`).

    The corruption of an image depends on `seed`, `task` and its position in the data set alone, so
    the severities of one corruption share their noise, direction or clouds.

    Args:
        data: The data set; in YAML a mapping with `_target_` that builds it, or a path or hub id as
            `load_images` takes it.
        corruption: `gaussian_noise`, `motion_blur` or `fog`.
        severity: 1 to 5.
        seed: Seeds the corruption, >= 0.
        task: Name that seeds it besides: data sets of other names get other noise.
        size: Length in pixels to which the shorter side is resized first, as ImageNet-C's 224; None
            leaves images as they are. Matters for large images: resizing averages noise away.
        split: Split of a path or hub id.
        image_column: Column that holds the images.

    Raises:
        ValueError: If there is no such corruption or severity, or a key is out of range.
        CalibrationError: If the data are no images or cannot be read.
    """
    check_corruption(corruption, severity)
    for name, value, (wanted, fits) in (
        ("seed", seed, integer(0)),
        ("size", size, nullable(integer(1))),
    ):
        if not fits(value):
            raise ValueError(f"{name} of corrupted data must be {wanted}, got {value!r}")
    items = _image_items(data, f"corruption {corruption}", split, image_column)
    return CorruptedImages(items, corruption, severity, seed, task, size)


class MixedRows(torch.utils.data.Dataset[Any]):
    """Items of several data sets in turn, as many of each as the smallest has."""

    def __init__(self, sets: Sequence[Any]) -> None:
        """Keep what `mixed` has checked."""
        self.sets = sets

    def __len__(self) -> int:
        return len(self.sets) * min(map(len, self.sets))

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number, place = divmod(index, len(self.sets))
        return self.sets[place][number]


def mixed(data: Sequence[Any]) -> MixedRows:
    """Mix the items of several data sets, of images or of texts, in equal numbers.

    Raises:
        ValueError: If there are none.
        CalibrationError: If one of them has no length or no numbered items.
    """
    if isinstance(data, str | Mapping) or not len(data):
        raise ValueError(f"data of mixed data sets must be a list of data sets, got {data!r}")
    for number, rows in enumerate(data):
        require_numbered(None if isinstance(rows, str) else rows, f"mixed data set {number}")
    return MixedRows(data)


class NoiseImages(Rows):
    """Images of independent uniform pixels, which show nothing."""

    def __init__(self, number: int = 1000, size: int = 224, seed: int = 42, task: str = "") -> None:
        """Make `number` RGB images of `size` pixels a side; `seed` and `task` seed them.

        Raises:
            ValueError: If number or size is no integer >= 1.
        """
        wanted, fits = integer(1)
        for name, value in (("number", number), ("size", size)):
            if not fits(value):
                raise ValueError(f"{name} of noise images must be {wanted}, got {value!r}")
        self._number, self._size, self._seeds = number, size, (seed, task)

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._number:
            raise IndexError(index)
        random = random_of(*self._seeds, index)
        pixels = random.integers(0, 256, (self._size, self._size, 3), dtype=np.uint8)
        return {"image": Image.fromarray(pixels)}


def _image_items(rows: Any, purpose: str, split: str | None, image_column: str) -> ImageItems:
    """See a data set as images; texts are refused before any is needed."""
    place = f"data of {purpose}"
    if isinstance(rows, str):
        rows = load_images(rows, split, image_column=image_column)
    if isinstance(rows, Mapping):
        raise ValueError(
            f"{place}: one data set is needed, got a mapping with the keys "
            f"{', '.join(map(str, rows))}: set its _target_, or the split that it loads"
        )
    require_numbered(rows, place)
    columns = getattr(rows, "column_names", None)
    if columns is None and not isinstance(rows, ImageItems) and len(rows):
        first = rows[0]
        columns = list(first) if isinstance(first, Mapping) else None
    if columns is not None and image_column not in columns:
        raise CalibrationError(
            f"{place}: images are needed, and the items have no {image_column!r} but "
            f"{', '.join(map(str, columns))}. Leave texts as they are, or set image_column"
        )
    return ImageItems(rows, place=place, image_column=image_column)
