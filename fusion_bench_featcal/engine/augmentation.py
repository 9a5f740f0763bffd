"""Further copies of calibration samples, changed a little."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import cos, radians, sin
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusion_bench_featcal.engine.samples import Batch, batch_generator
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)

COPIES = 3
"""Copies of each sample besides itself, unless `method.augment` says otherwise."""

Change = Callable[[Any, torch.Generator], Any]
"""Makes a changed copy of a batch of model inputs, from the given random numbers alone."""


class Jitter:
    """Turns, scales and shifts images a little; what comes in at a border repeats the border."""

    def __init__(self, degrees: float = 8.0, scale: float = 0.08, shift: float = 0.08) -> None:
        """Set the largest changes.

        Args:
            degrees: Angle.
            scale: Change of size, relative.
            shift: Shift along each side, relative to the side.
        """
        self._limits = degrees, scale, shift

    def __call__(self, inputs: Any, generator: torch.Generator) -> Any:
        """A changed copy of a batch of images.

        Args:
            inputs: Images `[batch, channels, height, width]`, or model inputs with such
                `pixel_values`, or a tuple that begins with them.
            generator: Random numbers.

        Raises:
            CalibrationError: If there are no images in it.
        """
        images = images_of(inputs)
        if images is None:
            raise CalibrationError(
                "method.augment=jitter needs images [batch, channels, height, width], and the "
                "inputs hold none. Set method.augment to null, to auto (which changes images "
                "only), or to a mapping with the `_target_` of a callable for such inputs"
            )
        changed = self._changed(images, generator)
        if isinstance(inputs, Mapping):
            return {**inputs, "pixel_values": changed}
        return (changed, *inputs[1:]) if isinstance(inputs, tuple) else changed

    def _changed(self, images: Tensor, generator: torch.Generator) -> Tensor:
        degrees, scale, shift = self._limits
        limits = torch.tensor([degrees, scale, 2 * shift, 2 * shift])  # a side is 2 long here
        draws = (2 * torch.rand(len(images), 4, generator=generator) - 1) * limits
        height, width = images.shape[-2:]
        maps = torch.tensor([_affine(draw, height / width) for draw in draws.tolist()])
        grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
        grid = grid.to(images.device, torch.promote_types(images.dtype, torch.float32))
        found = functional.grid_sample(
            images.to(grid.dtype), grid, padding_mode="border", align_corners=False
        )
        return found.to(images.dtype)


def _affine(draw: Sequence[float], ratio: float) -> list[list[float]]:
    """The map from places of the new image to those of the old, for `affine_grid`."""
    degrees, scale, right, down = draw
    c, s = ((1 + scale) * f(radians(degrees)) for f in (cos, sin))
    return [[c, -s * ratio, right], [s / ratio, c, down]]


def images_of(inputs: Any) -> Tensor | None:
    """Images in a batch of model inputs; None: there are none."""
    if isinstance(inputs, Mapping):
        inputs = inputs.get("pixel_values")
    elif isinstance(inputs, tuple):
        inputs = inputs[0]
    is_image = isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.is_floating_point()
    return inputs if is_image else None


def augmented(task: str, batches: Iterable[Batch], settings: FeatCalSettings) -> Iterator[Batch]:
    """Yield batches, each with its changed copies behind it as `method.augment` says.

    Copies have the numbers of the samples that they are of, and so are of the same folds. They
    depend on seed and task, and on the samples that are in one batch.

    Args:
        task: The task.
        batches: Its batches.
        settings: `augment` and `seed` are used.

    Raises:
        CalibrationError: If a batch cannot be changed, naming the task.
    """
    change = change_of(settings.augment)
    for batch in batches:
        yield batch
        for copy in range(0 if batch.held else copies_of(settings, batch.inputs)):
            generator = batch_generator("augment", settings.seed, task, batch.start, copy)
            try:
                inputs = change(batch.inputs, generator)
            except CalibrationError as error:
                raise CalibrationError(f"task {task}: {error}") from error
            yield replace(batch, inputs=inputs, folds={}, marks={})


def copies_of(settings: FeatCalSettings, inputs: Any) -> int:
    """Number of changed copies that are made of a batch of a model's inputs."""
    augment = settings.augment
    if augment is None or (augment == "auto" and images_of(inputs) is None):
        return 0
    return augment.get("copies", COPIES) if isinstance(augment, Mapping) else COPIES


def change_of(augment: Any) -> Change:
    """Make the callable that changes samples.

    Args:
        augment: The setting.

    Raises:
        ValueError: If it names something that cannot be made or called.
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
