"""Calibration samples of a task: taken, held out, and joined by changed copies."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import ceil
from typing import Any

from torch import nn

from fusion_bench_featcal.engine.augmentation import _changed as changed_by
from fusion_bench_featcal.engine.augmentation import change_of, images_of
from fusion_bench_featcal.engine.samples import batch_generator, part_of, take_samples
from fusion_bench_featcal.next.streams.batch import Batch
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

SHARE, MOST, LEAST = 8, 32, 16
"""`held_out=auto` holds out one sample of 8, 32 at most, and none of fewer than 16."""

ENOUGH, MOST_COPIES = 256, 7
"""Number of a task's samples, copies among them, beyond which further ones gain little, and the
largest number of copies of each."""


def take(
    task: str, batches: Iterable[Any], settings: FeatCalSettings, model: nn.Module
) -> list[Batch]:
    """Return a task's batches: as many samples as the settings ask for, the last ones held out.

    Args:
        task: The task.
        batches: Its model inputs.
        settings: `samples_per_task`, `held_out`, `augment` and `seed` are used.
        model: Takes the samples. Token ids are checked against its vocabulary.

    Raises:
        CalibrationError: If there is no sample, none is left to solve with, or one cannot be used.
    """
    taken = [
        Batch(batch.inputs, batch.samples, batch.start)
        for batch in take_samples(task, batches, settings, model)
    ]
    samples = sum(batch.samples for batch in taken)
    held_out = number_held_out(samples, settings.held_out)
    if held_out >= samples:
        raise CalibrationError(
            f"task {task}: method.held_out={held_out} leaves none of its "
            f"{counted(samples, 'sample')} to solve with. Lower it, or set it to auto"
        )
    dealt = list(hold_out(taken, samples - held_out))
    copies = number_of_copies(samples - held_out, settings, dealt[0].inputs)
    return [part for batch in dealt for part in with_copies(task, batch, copies, settings)]


def number_held_out(samples: int, held_out: int | str) -> int:
    """Return the number of a task's samples to hold out."""
    if held_out != "auto":
        return int(held_out)
    return 0 if samples < LEAST else min(samples // SHARE, MOST)


def hold_out(batches: Iterable[Batch], used: int) -> Iterator[Batch]:
    """Yield batches. Samples from number `used` on are held out, in batches of their own."""
    for batch in batches:
        count = min(max(used - batch.start, 0), batch.samples)
        for part, is_held_out in ((slice(count), False), (slice(count, None), True)):
            size = len(range(batch.samples)[part])
            if size:
                yield Batch(
                    part_of(batch.inputs, batch.samples, part),
                    size,
                    batch.start + count * is_held_out,
                    is_held_out,
                )


def number_of_copies(samples: int, settings: FeatCalSettings, inputs: Any) -> int:
    """Return the number of changed copies of each sample; the fewer samples, the more."""
    augment = settings.augment
    if augment is None or (augment == "auto" and images_of(inputs) is None):
        return 0
    given = None if isinstance(augment, str) else augment.get("copies")
    return max(1, min(ceil(ENOUGH / samples) - 1, MOST_COPIES)) if given is None else given


def with_copies(task: str, batch: Batch, copies: int, settings: FeatCalSettings) -> Iterator[Batch]:
    """Yield a batch, and batches of changed copies of its samples, which are in the same folds.

    A copy depends on seed, task and the sample's number alone.
    """
    yield batch
    if not copies or batch.is_held_out:
        return
    change = change_of(settings.augment)
    for copy in range(copies):
        numbers = range(batch.start, batch.start + batch.samples)
        random = [batch_generator("augment", settings.seed, task, n, copy) for n in numbers]
        try:
            inputs = changed_by(change, batch.inputs, random)
        except CalibrationError as error:
            raise CalibrationError(f"task {task}: {error}") from error
        yield replace(batch, inputs=inputs, samples=0)
