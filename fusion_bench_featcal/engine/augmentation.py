"""Further copies of calibration samples, changed a little."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import ceil, cos, radians, sin
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusion_bench_featcal.engine.fold_rows import FOLDS
from fusion_bench_featcal.engine.samples import Batch, batch_generator, part_of
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)

ENOUGH, MOST = 256, 7
"""Samples of a task, copies among them, beyond which further ones gain little; copies of each."""

Change = Callable[[Any, torch.Generator], Any]
"""Makes a changed copy of a batch of model inputs, from the given random numbers alone.

It is called with one sample at a time. One that has a method `each` is called through that with
many samples and a generator for each of them.
"""


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
        return self.each(inputs, [generator] * len(_required_images(inputs)))

    def each(self, inputs: Any, generators: Sequence[torch.Generator]) -> Any:
        """The same with random numbers for each image."""
        images = _required_images(inputs)
        draws = [torch.rand(1, 4, generator=generator) for generator in generators]
        changed = self._changed(images, torch.cat(draws))
        if isinstance(inputs, Mapping):
            return {**inputs, "pixel_values": changed}
        return (changed, *inputs[1:]) if isinstance(inputs, tuple) else changed

    def _changed(self, images: Tensor, draws: Tensor) -> Tensor:
        degrees, scale, shift = self._limits
        limits = torch.tensor([degrees, scale, 2 * shift, 2 * shift])  # a side is 2 long here
        height, width = images.shape[-2:]
        steps = ((2 * draws - 1) * limits).tolist()
        maps = torch.tensor([_affine(step, height / width) for step in steps])
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


def _required_images(inputs: Any) -> Tensor:
    images = images_of(inputs)
    if images is None:
        raise CalibrationError(
            "method.augment=jitter needs images [batch, channels, height, width], and the "
            "inputs hold none. Set method.augment to null, to auto (which changes images "
            "only), or to a mapping with the `_target_` of a callable for such inputs"
        )
    return images


def augmented(
    task: str,
    batches: Iterable[Batch],
    settings: FeatCalSettings,
    cut: Callable[[str, Iterable[Batch]], Iterable[Batch]] = lambda _, batches: batches,
) -> Iterator[Batch]:
    """Yield batches, each with changed copies of its samples as `method.augment` says.

    A copy is of its original's fold. It depends on seed, task and the sample's number, and not on
    the samples in one batch with it. Copies are in one batch with their originals, behind these,
    where the folds of its samples follow one another all the way; else in batches of their own.

    Args:
        task: The task.
        batches: Its batches.
        settings: `augment` and `seed` are used.
        cut: Selects the batches that this process works on, given the task and all its batches.

    Raises:
        CalibrationError: If a batch cannot be changed, naming the task.
    """
    change, samples = change_of(settings.augment), 0
    if settings.augment is not None:
        samples, batches = _counted(batches)
    for batch in cut(task, batches):
        count = 0 if batch.held else copies_of(settings, batch.inputs, samples)
        try:
            copies = _copies(task, batch, change, settings, count)
        except CalibrationError as error:
            raise CalibrationError(f"task {task}: {error}") from error
        whole = _whole(batch, copies)
        yield whole
        for inputs in copies if whole is batch else ():
            yield replace(batch, inputs=inputs, copies=batch.samples, folds={}, marks={})


def _counted(batches: Iterable[Batch]) -> tuple[int, Iterator[Batch]]:
    """Number of samples in batches, counted as far as it matters for copies, and the batches."""
    remaining, first, samples = iter(batches), list[Batch](), 0
    while samples < ENOUGH / 2 and (batch := next(remaining, None)) is not None:
        first.append(batch)
        samples += batch.samples
    return samples, chain(first, remaining)


def _whole(batch: Batch, copies: Sequence[Any]) -> Batch:
    """The batch with its copies behind it; without them, where they do not belong into it."""
    if not (copies and is_joined(batch.samples)):
        return batch
    try:
        inputs = _joined([batch.inputs, *copies], batch.samples)
    except ValueError:  # their shapes differ
        return batch
    added = batch.samples * len(copies)
    samples = batch.samples + added
    return replace(batch, inputs=inputs, samples=samples, copies=added, folds={}, marks={})


def _copies(
    task: str, batch: Batch, change: Change, settings: FeatCalSettings, count: int
) -> list[Any]:
    numbers = range(batch.start, batch.start + batch.samples)
    return [
        _changed(
            change,
            batch.inputs,
            [batch_generator("augment", settings.seed, task, number, copy) for number in numbers],
        )
        for copy in range(count)
    ]


def is_joined(samples: int) -> bool:
    """Return whether copies are in one batch with so many originals.

    They are where the folds go on in turn from the last sample to the first one's copy.
    """
    return samples % FOLDS == 0


def _changed(change: Change, inputs: Any, generators: Sequence[torch.Generator]) -> Any:
    """A changed copy of a batch, from random numbers for each sample."""
    each = getattr(change, "each", None)
    if each is not None:
        return each(inputs, generators)
    count = len(generators)
    parts = [
        change(part_of(inputs, count, slice(n, n + 1)), generator)
        for n, generator in enumerate(generators)
    ]
    try:
        return _joined(parts, 1)
    except ValueError as error:
        raise CalibrationError(
            f"method.augment: {type(change).__name__} changes samples of one batch to {error}"
        ) from error


def _joined(parts: Sequence[Any], count: int) -> Any:
    """One batch of batches with `count` samples each.

    Raises:
        ValueError: If they do not fit together.
    """
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts], count) for key in first}
    if isinstance(first, tuple):
        return tuple(_joined(values, count) for values in zip(*parts, strict=True))
    if not (isinstance(first, Tensor) and first.ndim > 0 and len(first) == count):
        return first  # the same for all samples
    kinds = {f"{list(part.shape[1:])} {part.dtype}": len(part) for part in parts}
    if len(kinds) > 1 or any(len(part) != count for part in parts):
        raise ValueError(f"tensors that are not alike: {', '.join(kinds)}")
    return torch.cat(list(parts))


def copies_of(settings: FeatCalSettings, inputs: Any, samples: int) -> int:
    """Number of changed copies that are made of each sample of a task.

    Args:
        settings: `augment` is used.
        inputs: A batch of the model's inputs.
        samples: Number of samples that the task has.
    """
    augment = settings.augment
    if augment is None or (augment == "auto" and images_of(inputs) is None):
        return 0
    given = augment.get("copies") if isinstance(augment, Mapping) else None
    if given is not None:
        return given
    missing = ceil(ENOUGH / samples) - 1
    return max(1, min(missing, MOST))


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
