"""Jittered copies of images among the calibration samples."""

from collections.abc import Mapping, Sequence
from math import ceil, cos, radians, sin
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option

ENOUGH, MOST = 256, 7
"""Number of samples beyond which copies gain little, and the largest number of copies of each."""

LIMITS = (8.0, 0.08, 0.16, 0.16)
"""Largest changes: angle in degrees, size, and shifts along both sides, which are 2 long."""


def number_of_copies(samples: int, augment: str, inputs: Any) -> int:
    """Return the number of changed copies of each sample. It falls with the number of samples.

    Args:
        samples: Number of samples that the task has.
        augment: The setting: `none`, `auto` (images only) or `jitter`.
        inputs: A batch of the model's inputs.

    Raises:
        CalibrationError: If the setting is `jitter` and the inputs hold no images.
    """
    if augment == "none" or (augment == "auto" and images_of(inputs) is None):
        return 0
    if images_of(inputs) is None:
        raise CalibrationError(
            f"{option('augment', 'jitter')} needs images [batch, channels, height, width], and the "
            f"inputs hold none. Use {option('augment', 'auto')}, which changes images only"
        )
    return max(1, min(ceil(ENOUGH / samples) - 1, MOST))


def images_of(inputs: Any) -> Tensor | None:
    """Return the images in a batch of model inputs, or None if there are none."""
    if isinstance(inputs, Mapping):
        inputs = inputs.get("pixel_values")
    elif isinstance(inputs, tuple):
        inputs = inputs[0]
    is_image = isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.is_floating_point()
    return inputs if is_image else None


def jittered(inputs: Any, generators: Sequence[torch.Generator]) -> Any:
    """Return a batch whose images are rotated, scaled and shifted a little. Borders are repeated.

    Args:
        inputs: Images `[batch, channels, height, width]`, or model inputs with such `pixel_values`,
            or a tuple that begins with them.
        generators: Random numbers of each image.

    Raises:
        CalibrationError: If there are none.
    """
    images = images_of(inputs)
    if images is None:
        raise CalibrationError(
            "a batch has no floating-point images [batch, channels, height, width], unlike the "
            f"task's first batch: convert it, or use {option('augment', 'none')}"
        )
    draws = torch.cat([torch.rand(1, 4, generator=generator) for generator in generators])
    height, width = images.shape[-2:]
    steps = ((2 * draws - 1) * torch.tensor(LIMITS)).tolist()
    maps = torch.tensor([_affine(step, height / width) for step in steps])
    grid = affine_grid(maps, list(images.shape), align_corners=False)
    grid = grid.to(images.device, torch.promote_types(images.dtype, torch.float32))
    changed = grid_sample(
        images.to(grid.dtype), grid, padding_mode="border", align_corners=False
    ).to(images.dtype)
    if isinstance(inputs, Mapping):
        return {**inputs, "pixel_values": changed}
    return (changed, *inputs[1:]) if isinstance(inputs, tuple) else changed


def _affine(draw: Sequence[float], ratio: float) -> list[list[float]]:
    """Return the map from positions of the new image to positions of the old, for `affine_grid`."""
    degrees, scale, right, down = draw
    c, s = ((1 + scale) * f(radians(degrees)) for f in (cos, sin))
    return [[c, -s * ratio, right], [s / ratio, c, down]]
