"""Calibration data made of other data sets or of noise, for `_target_` in YAML."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from fusion_bench_featcal.data.corruptions import check_corruption, corrupt, random_of
from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.tables import require_numbered
from fusion_bench_featcal.setting_fields import is_integer

Rows = torch.utils.data.Dataset[dict[str, Any]]


class CorruptedImages(Rows):
    """Items of a data set with corrupted images: `{"image": RGB picture, ...}`."""

    def __init__(
        self, items: ImageItems, corruption: str, severity: int, seed: int, task: str,
        size: int | None,
    ) -> None:  # fmt: skip
        """Store the arguments of `corrupted`."""
        self.items, self.background = items, items.background
        self._corruption, self._severity, self._size = corruption, severity, size
        self._seed, self._task = seed, task

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.items[index]
        picture = item["image"]
        if self._size is not None:
            scale = self._size / min(picture.size)
            picture = ImageOps.scale(picture, scale, Image.Resampling.BICUBIC)
        random = random_of(self._seed, self._task, index)
        return item | {"image": corrupt(picture, self._corruption, self._severity, random)}


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

    The random numbers of an image depend on `seed`, `task` and its position only, so the severities
    of one corruption share their noise, direction or clouds.

    Args:
        data: The data set (in YAML a mapping with `_target_`), or a path or hub id as for
            `load_images`.
        corruption: `gaussian_noise`, `motion_blur` or `fog`.
        severity: 1 to 5.
        seed: Seed, >= 0.
        task: Name of the task, part of the seed.
        size: Length in pixels to which the shorter side is resized first, as ImageNet-C's 224. None
            leaves images as they are. A large image that is resized later loses noise.
        split: Split of a path or hub id.
        image_column: Column of the images.

    Raises:
        ValueError: If there is no such corruption or severity, or a key is out of range.
        CalibrationError: If the data are not one data set of images, or cannot be read.
    """
    check_corruption(corruption, severity)
    _check_integer("seed of corrupted data", seed, 0)
    if size is not None:
        _check_integer("size of corrupted data", size, 1)
    if isinstance(data, str):
        data = load_images(data, split, image_column=image_column)
    items = ImageItems(data, name=f"data of corruption {corruption}", image_column=image_column)
    return CorruptedImages(items, corruption, severity, seed, task, size)


class MixedRows(torch.utils.data.Dataset[Any]):
    """Items of several data sets in turn, an equal number of each."""

    def __init__(self, sets: Sequence[Any]) -> None:
        """Store the data sets, which `mixed` has checked."""
        self.sets = sets

    def __len__(self) -> int:
        return len(self.sets) * min(map(len, self.sets))

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        item, data_set = divmod(index, len(self.sets))
        return self.sets[data_set][item]


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
    """Images of independent uniform pixels."""

    def __init__(self, number: int = 1000, size: int = 224, seed: int = 42, task: str = "") -> None:
        """Define `number` RGB images of `size` pixels a side, seeded by `seed` and `task`.

        Raises:
            ValueError: If number or size is no integer >= 1.
        """
        _check_integer("number of noise images", number, 1)
        _check_integer("size of noise images", size, 1)
        self._number, self._size, self._seed, self._task = number, size, seed, task

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._number:
            raise IndexError(index)
        random = random_of(self._seed, self._task, index)
        pixels = random.integers(0, 256, (self._size, self._size, 3), dtype=np.uint8)
        return {"image": Image.fromarray(pixels)}


def _check_integer(name: str, value: Any, least: int) -> None:
    if not is_integer(value, least):
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
