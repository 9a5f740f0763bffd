"""Corrupted images of a dataset."""

from typing import Any

from PIL import Image, ImageOps

from fusion_bench_featcal.data.computed_rows import ComputedRows
from fusion_bench_featcal.data.corruptions import check_corruption, corrupt, random_of
from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.settings.fields import is_integer


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


def _check_integer(name: str, value: Any, least: int) -> None:
    if not is_integer(value, least):
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
