"""Calibration samples of a task: selected, partly held out, and joined by jittered copies."""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, cos, radians, sin
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.errors.words import option, user_term
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.rules import Rule
from fusion_bench_featcal.settings.options import Options
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.inputs import (
    check_token_ids,
    largest_tensor,
    part_of,
    size_and_rank,
)

log = logging.getLogger(__name__)

HELD = 4
"""One in this many of a task's samples is held out, drawn by the seed, if a rule asks for it."""


def check_inputs(
    base: Any, experts: Mapping[str, Any], batches: Mapping[str, Any], rule: Rule
) -> None:
    """Check models and data of a calibration against its rule.

    Args:
        base: The base model or its source, or None.
        experts: Experts by task.
        batches: Batches by task.
        rule: The rule.

    Raises:
        ValueError: If rho needs a base model and there is none.
        CalibrationError: If a task lacks its expert or its data, or has one batch in place of
            several.
    """
    for name, mapping in (("experts", experts), ("batches", batches)):
        if not isinstance(mapping, Mapping) or not all(isinstance(task, str) for task in mapping):
            raise TypeError(f"{name} must map names of tasks to their values, not {mapping!r:.80}")
    if base is None and rule.needs_base:
        rho = getattr(rule, "anchor_rho", None)
        remedy = "" if rho is None else f"; without one use {option('anchor_rho', 1)}"
        raise ValueError(
            f"{type(rule).__name__ if rho is None else option('anchor_rho', rho)} needs the base "
            f"model{remedy}"
        )
    if not experts:
        raise CalibrationError("there is no expert to calibrate towards. Name the experts")
    if alone := sorted({*batches} ^ {*experts}):
        raise CalibrationError(
            f"tasks {alone} have no expert or no calibration data: the experts are "
            f"{sorted(experts)}, but there is data for {sorted(batches)}. Use one name for a task, "
            "its expert and its data"
        )
    for task, values in batches.items():
        if isinstance(values, Tensor | Mapping | str):
            shape = f" {list(values.shape)}" if isinstance(values, Tensor) else ""
            raise CalibrationError(
                f"{user_term('batches', task)} is one {type(values).__name__}{shape}, but must be "
                "an iterable of batches: put a single batch into a list, [batch]"
            )
    weights = getattr(rule, "task_weights", None)  # RegMean's is a text
    if unknown := sorted(set(weights if isinstance(weights, Mapping) else ()) - set(experts)):
        raise CalibrationError(
            f"{option('task_weights')} names tasks {unknown} that have no expert; experts are "
            f"{sorted(experts)}"
        )


def take(
    task: str,
    batches: Iterable[Any],
    options: Options,
    model: nn.Module,
    *,
    holds_out: bool = False,
) -> list[Batch]:
    """Return a task's batches with the number of samples in the options, and changed copies.

    Args:
        task: The task.
        batches: Its model inputs. If it has an attribute `samples`, too few cause no warning.
        options: `samples_per_task`, `augment` and `seed` are used.
        model: The model that receives them. Token ids are checked against its vocabulary.
        holds_out: Whether a quarter of the samples is held out to choose ridges.

    Raises:
        CalibrationError: If there is no sample, or one cannot be used.
    """
    taken = list(take_samples(task, batches, options.samples_per_task, model))
    samples = sum(batch.samples for batch in taken)
    with error_context(task=task):
        copies = number_of_copies(samples, options.augment or "none", taken[0].inputs)
    if holds_out:
        held_out = drawn_quarter(samples, batch_generator("held out", options.seed, task))
        for batch in taken:
            batch.held_out = held_out[batch.start : batch.start + batch.samples]
    return [copy for batch in taken for copy in with_copies(task, batch, copies, options.seed)]


def drawn_quarter(samples: int, generator: torch.Generator) -> Tensor:
    """Return a mask `[samples]` of a quarter, rounded down, that is drawn by a generator.

    A fixed pattern, such as every fourth, may be one of the data, such as an order by classes.
    """
    drawn = torch.randperm(samples, generator=generator)
    return torch.zeros(samples, dtype=torch.bool).index_fill(0, drawn[: samples // HELD], True)


def take_samples(
    task: str, batches: Iterable[Any], limit: int | None, model: nn.Module
) -> Iterator[Batch]:
    """Yield `limit` samples, or all if there are fewer or it is None. The last batch is cut to fit.

    Other arguments and errors are those of `take`.
    """
    taken, rank = 0, None
    for number, batch in enumerate(batches):
        inputs = tuple(batch) if isinstance(batch, list) else batch  # as DataLoader collates rows
        size, dimensions = size_and_rank(label := f"{user_term('batches', task)}[{number}]", inputs)
        if dimensions != (rank := dimensions if rank is None else rank):
            raise CalibrationError(
                f"{label} has {dimensions} dimensions, but the first batch has {rank}: give a "
                "single sample as a batch of one, sample[None]"
            )
        if limit is not None and size > limit - taken:
            inputs, size = part_of(inputs, size, slice(limit - taken)), limit - taken
        check_token_ids(inputs, model, partial(_location_of_row, label, batches, taken))
        yield Batch(inputs, size, taken)
        taken += size
        if taken == limit:
            return
    if taken == 0:
        raise CalibrationError(f"{user_term('batches', task)} have no samples. Give the task data")
    if limit is not None and getattr(batches, "samples", None) is None:
        warn_of_few_samples(task, taken, limit)


def warn_of_few_samples(task: str, available: int, limit: int) -> None:
    """Warn that a task has fewer samples than the settings require."""
    warning = "task %s has %s, fewer than %s: all of them are used"
    count, wanted = pluralize(available, "sample"), option("samples_per_task", limit)
    log.warning(warning, task, count, wanted)


def _location_of_row(label: str, batches: Any, taken: int, row: int) -> str:
    """Return a sample's name for messages: its name in the dataset, if batches have it."""
    name_of = getattr(batches, "row_name", None)
    return f"{label}, sample {row}" if name_of is None else name_of(taken + row)


def with_copies(task: str, batch: Batch, copies: int, seed: int) -> Iterator[Batch]:
    """Yield a batch, then batches of changed copies of its samples.

    A copy depends only on seed, task, and the numbers of sample and copy.
    """
    yield batch
    for copy in range(copies):
        numbers = range(batch.start, batch.start + batch.samples)
        random = [batch_generator("augment", seed, task, n, copy) for n in numbers]
        with error_context(task=task):
            inputs = jittered(batch.inputs, random)
        yield replace(batch, inputs=inputs, copy=copy + 1)


def batch_generator(purpose: str, seed: int, task: str, *numbers: int) -> torch.Generator:
    """Return random numbers that depend on a purpose, the task and, optionally, sample numbers."""
    text = " ".join(map(str, (purpose, seed, task, *numbers)))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))


def resolved_decoder_rows(decoder_rows: str, inputs: Any) -> str:
    """Return `decoder_rows`, or for `auto` the positions that the output is read from.

    These are targets in a batch with labels, else all.
    """
    if decoder_rows != "auto":
        return decoder_rows
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    return "targets" if isinstance(labels, Tensor) and labels.ndim == 2 else "all"


def longest_sample(
    tasks: Mapping[str, list[Batch]], family: Family, model: nn.Module
) -> tuple[int, str, int, int]:
    """Return its positions, negative, its task, batch and number: its priority among processes.

    Padding does not count. The choice does not depend on the order of tasks.
    """
    samples = list[tuple[int, str, int, int]]()
    for task, batches in tasks.items():
        for number, batch in enumerate(batches):
            with error_context(task=task):
                mask = family.masks(model, batch.inputs, 0, "all").get("")
            if mask is None:
                counts = torch.full((batch.samples,), largest_tensor(batch.inputs) // batch.samples)
            else:
                counts = (mask > 0).flatten(1).sum(1)
            samples.append((-int(counts.max()), task, number, int(counts.argmax())))
    return min(samples)


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
    """
    if augment == "none" or (augment == "auto" and images_of(inputs) is None):
        return 0
    return max(1, min(ceil(ENOUGH / samples) - 1, MOST))


def images_of(inputs: Any) -> Tensor | None:
    """Return the images in a batch of model inputs, or None if there are none, or texts on them."""
    if isinstance(inputs, Mapping):
        inputs = None if "input_ids" in inputs else inputs.get("pixel_values")
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
            "a batch has no floating-point images [batch, channels, height, width] to jitter: "
            f"convert it, or use {option('augment', 'none')}"
        )
    draws = torch.cat([torch.rand(1, 4, generator=g, dtype=torch.float32) for g in generators])
    height, width = images.shape[-2:]
    steps = ((2 * draws - 1) * draws.new_tensor(LIMITS)).tolist()
    maps = draws.new_tensor([_affine(step, height / width) for step in steps])
    grid = affine_grid(maps, list(images.shape), align_corners=False)
    grid = grid.to(images.device, torch.promote_types(images.dtype, torch.float32))
    changed = grid_sample(images.to(grid.dtype), grid, padding_mode="border", align_corners=False)
    changed = changed.to(images.dtype)
    if isinstance(inputs, Mapping):
        return {**inputs, "pixel_values": changed}
    return (changed, *inputs[1:]) if isinstance(inputs, tuple) else changed


def _affine(draw: Sequence[float], ratio: float) -> list[list[float]]:
    """Return the map from positions of the new image to positions of the old, for `affine_grid`."""
    degrees, scale, right, down = draw
    c, s = ((1 + scale) * f(radians(degrees)) for f in (cos, sin))
    return [[c, -s * ratio, right], [s / ratio, c, down]]
