"""Changed copies of calibration samples."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, cos, radians, sin
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.streams.inputs import joined, part_of

ENOUGH, MOST = 256, 7
"""Number of samples beyond which copies gain little, and the largest number of copies of each."""

Change = Callable[[Any, torch.Generator], Any]
"""Returns a changed copy of a batch of one sample, using only the given random numbers. If the
object has a method `with_generators`, it is called with many samples and one generator for each."""


class Jitter:
    """Rotates, scales and shifts images a little. Borders are repeated."""

    def __init__(self, degrees: float = 8.0, scale: float = 0.08, shift: float = 0.08) -> None:
        """Set the largest changes.

        Args:
            degrees: Angle.
            scale: Change of size, relative.
            shift: Shift along each side, relative to the side.
        """
        self._limits = degrees, scale, shift

    def __call__(self, inputs: Any, generator: torch.Generator) -> Any:
        """Return a changed copy of a batch of images.

        Args:
            inputs: Images `[batch, channels, height, width]`, or model inputs with such
                `pixel_values`, or a tuple that begins with them.
            generator: Random numbers.

        Raises:
            CalibrationError: If the batch has no images.
        """
        return self.with_generators(inputs, [generator] * len(_required_images(inputs)))

    def with_generators(self, inputs: Any, generators: Sequence[torch.Generator]) -> Any:
        """Return changed copies of many images, with separate random numbers for each."""
        images = _required_images(inputs)
        draws = torch.cat([torch.rand(1, 4, generator=generator) for generator in generators])
        degrees, scale, shift = self._limits
        limits = torch.tensor([degrees, scale, 2 * shift, 2 * shift])  # a side is 2 long here
        height, width = images.shape[-2:]
        steps = ((2 * draws - 1) * limits).tolist()
        maps = torch.tensor([_affine(step, height / width) for step in steps])
        grid = affine_grid(maps, list(images.shape), align_corners=False)
        grid = grid.to(images.device, torch.promote_types(images.dtype, torch.float32))
        wide = images.to(grid.dtype)
        changed = grid_sample(wide, grid, padding_mode="border", align_corners=False)
        changed = changed.to(images.dtype)
        if isinstance(inputs, Mapping):
            return {**inputs, "pixel_values": changed}
        return (changed, *inputs[1:]) if isinstance(inputs, tuple) else changed


def _affine(draw: Sequence[float], ratio: float) -> list[list[float]]:
    """Return the map from positions of the new image to positions of the old, for `affine_grid`."""
    degrees, scale, right, down = draw
    c, s = ((1 + scale) * f(radians(degrees)) for f in (cos, sin))
    return [[c, -s * ratio, right], [s / ratio, c, down]]


def images_of(inputs: Any) -> Tensor | None:
    """Return the images in a batch of model inputs, or None if there are none."""
    if isinstance(inputs, Mapping):
        inputs = inputs.get("pixel_values")
    elif isinstance(inputs, tuple):
        inputs = inputs[0]
    is_image = isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.is_floating_point()
    return inputs if is_image else None


def _required_images(inputs: Any) -> Tensor:
    images = images_of(inputs)
    if images is None:
        raise CalibrationError(
            "method.augment=jitter needs images [batch, channels, height, width], and the "
            "inputs hold none. Set method.augment to null, to auto (which changes images "
            "only), or to a mapping with the `_target_` of a callable for such inputs"
        )
    return images


def number_of_copies(samples: int, augment: Any, inputs: Any) -> int:
    """Return the number of changed copies of each sample. It falls with the number of samples.

    Args:
        samples: Number of samples that the task has.
        augment: The setting.
        inputs: A batch of the model's inputs.
    """
    if augment is None or (augment == "auto" and images_of(inputs) is None):
        return 0
    copies = augment.get("copies") if isinstance(augment, Mapping) else None
    return max(1, min(ceil(ENOUGH / samples) - 1, MOST)) if copies is None else copies


def change_of(augment: Any) -> Change:
    """Return the callable that changes samples.

    Args:
        augment: The setting.

    Raises:
        ValueError: If the setting names something that cannot be created or called.
    """
    if not isinstance(augment, Mapping):
        return Jitter()
    options = {name: value for name, value in augment.items() if name != "copies"}
    target = options.pop("_target_")
    try:
        change = resolve_name(target)(**options)
    except Exception as error:
        raise ValueError(f"method.augment: {target}: {error}") from error
    if not callable(change):
        raise ValueError(
            f"method.augment: {target} made a {type(change).__name__}, which cannot "
            "be called with a batch of inputs and a torch.Generator"
        )
    return change


def changed(change: Change, inputs: Any, generators: Sequence[torch.Generator]) -> Any:
    """Return a changed copy of a batch, with separate random numbers for each sample.

    Raises:
        CalibrationError: If the changed samples have different shapes.
    """
    with_generators = getattr(change, "with_generators", None)
    if with_generators is not None:
        return with_generators(inputs, generators)
    count = len(generators)
    samples = [
        change(part_of(inputs, count, slice(n, n + 1)), generator)
        for n, generator in enumerate(generators)
    ]
    try:
        return joined(samples, 1)
    except ValueError as error:
        raise CalibrationError(
            f"method.augment: {type(change).__name__} changes samples of one batch to {error}"
        ) from error
