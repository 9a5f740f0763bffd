"""Calibration data made of other datasets or of noise, for `_target_` in YAML."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from fusion_bench_featcal.data.computed_rows import ComputedRows
from fusion_bench_featcal.data.corruptions import check_corruption, corrupt, random_of
from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.tables import require_numbered
from fusion_bench_featcal.setting_fields import is_integer


def corrupted(
    data: Any,
    corruption: str,
    severity: int = 3,
    seed: int = 42,
    task: str = "",
    size: int | None = None,
    split: str | None = None,
    image_column: str = "image",
) -> ComputedRows:
    """Corrupt the images of a dataset as ImageNet-C (see `data/corruptions.py`).

    The random numbers of an image depend on `seed`, `task` and its position only, so the severities
    of one corruption share their noise, direction or clouds.

    Args:
        data: The dataset (in YAML a mapping with `_target_`), or a path or hub id as for
            `load_images`.
        corruption: `gaussian_noise`, `motion_blur` or `fog`.
        severity: 1 to 5.
        seed: Seed, >= 0.
        task: Name of the task, part of the seed.
        size: Length in pixels to which the shorter side is resized first, such as 224 for
            ImageNet-C. None leaves images unchanged. A later reduction in size would weaken the
            noise.
        split: Split of a path or hub id.
        image_column: Column of the images.

    Returns:
        Items `{"image": RGB picture, ...}`.

    Raises:
        ValueError: If there is no such corruption or severity, or a key is out of range.
        CalibrationError: If the data are not one dataset of images, or cannot be read.
    """
    check_corruption(corruption, severity)
    _check_integer("seed of corrupted data", seed, 0)
    if size is not None:
        _check_integer("size of corrupted data", size, 1)
    if isinstance(data, str):
        data = load_images(data, split, image_column=image_column)
    items = ImageItems(data, name=f"data of corruption {corruption}", image_column=image_column)

    def make(index: int) -> dict[str, Any]:
        item = items[index]
        picture = item["image"]
        if size is not None:
            picture = ImageOps.scale(picture, size / min(picture.size), Image.Resampling.BICUBIC)
        random = random_of(seed, task, index)
        return item | {"image": corrupt(picture, corruption, severity, random)}

    return ComputedRows(len(items), make)


def mixed(data: Sequence[Any]) -> ComputedRows:
    """Interleave the items of several datasets of images or of texts.

    Returns:
        As many items of each dataset as the smallest has.

    Raises:
        ValueError: If there are none.
        CalibrationError: If one of them has no length or no numbered items.
    """
    if isinstance(data, str | Mapping) or not len(data):
        raise ValueError(f"data of mixed datasets must be a list of datasets, got {data!r}")
    for number, rows in enumerate(data):
        require_numbered(rows, f"mixed dataset {number}")
    total = len(data) * min(map(len, data))
    return ComputedRows(total, lambda index: data[index % len(data)][index // len(data)])


class NoiseImages(ComputedRows):
    """Images of independent uniform pixels."""

    def __init__(self, number: int = 1000, size: int = 224, seed: int = 42, task: str = "") -> None:
        """Define `number` RGB images of `size` pixels a side, seeded by `seed` and `task`.

        Raises:
            ValueError: If number or size is not an integer >= 1.
        """
        _check_integer("number of noise images", number, 1)
        _check_integer("size of noise images", size, 1)
        super().__init__(number, partial(_noise_item, size, (seed, task)))


def _noise_item(size: int, seed: tuple[int, str], index: int) -> dict[str, Any]:
    pixels = random_of(*seed, index).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return {"image": Image.fromarray(pixels)}


def _check_integer(name: str, value: Any, least: int) -> None:
    if not is_integer(value, least):
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
