"""Calibration samples on their way through the blocks."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.engine.problem import Problem, is_language_model
from fusion_bench_featcal.engine.rows import CountedRows
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)


@dataclass
class Batch:
    """One batch of a task on its way through the blocks.

    Attributes:
        inputs: The model's inputs, kept only where a later stage begins from them.
        samples: Number of samples.
        index: Its number among the task's batches, from 0.
        cal: Input of the calibrated model's next block.
        exp: Input of the expert's next block; None where expert features are not used.
        exp_hidden: The expert's output of the block in hand, where the drift is logged.
        valid: The positions that count; None: all do.
        other: The same for modules that receive other rows, by the end of their names.
        booked: The place where its features wait, as `Activations` numbers them, and their bytes.
        start: Number of the task's samples before it.
        marks: Features at the block in hand that its later turns need, by what they are of.
        sensitivity: Weights of the rows of modules' outputs, where the settings ask for them.
        folds: Rows of each fold, by the identity of the mask of those that count.
        held: Whether it is held out: it takes no part in the solves.
        merged: Input of the merged model's next block, where it is held out.
        compared: The positions at which models are compared, in the last stage those whose final
            features are read; None: all.
        copies: Number of its samples that are changed copies of others.
    """

    inputs: Any
    samples: int
    index: int = 0
    cal: Any = None
    exp: Any = None
    exp_hidden: Any = None
    valid: CountedRows | None = None
    other: Mapping[str, CountedRows | None] = field(default_factory=dict)
    booked: tuple[int, float] = (0, 0)
    start: int = 0
    marks: Any = field(default_factory=dict)
    sensitivity: Mapping[str, Tensor] | None = None
    folds: dict[int, Any] = field(default_factory=dict)
    held: bool = False
    merged: Any = None
    compared: CountedRows | None = None
    copies: int = 0

    def split(self, count: int) -> "tuple[Batch, Batch]":
        """The first samples, and the others; before its way through the blocks."""
        first, rest = (
            part_of(self.inputs, self.samples, part) for part in (slice(count), slice(count, None))
        )
        return (
            replace(self, inputs=first, samples=count),
            replace(self, inputs=rest, samples=self.samples - count, start=self.start + count),
        )


def find_rows(
    problem: Problem, inputs: Any, stage: int
) -> tuple[CountedRows | None, dict[str, CountedRows | None]]:
    """Ask a family which rows of a stage count.

    Args:
        problem: The problem.
        inputs: A batch of the model's inputs.
        stage: The stage's index.

    Returns:
        `valid` and `other` of the batch.

    Raises:
        CalibrationError: If a mask is unusable, or a sample has no row that counts: what it would
            feed to other rows is noise.
    """
    counted: dict[int, tuple[Tensor, CountedRows]] = {}

    def rows(mask: Tensor | None) -> CountedRows | None:
        if mask is None:
            return None
        if id(mask) not in counted:  # modules with one mask may share a statistic
            tables = problem.family.has_tables
            counted[id(mask)] = mask, CountedRows.of_mask(mask, has_tables=tables)
        return counted[id(mask)][1]

    sensitive = weighs_by_sensitivity(problem.settings, problem.model)
    decoder_rows = "all" if sensitive else rows_named(problem.settings, inputs)
    valid = rows(problem.family.row_weights(inputs, stage, decoder_rows))
    others = problem.family.other_rows(inputs, stage)
    return valid, {end: rows(mask) for end, mask in others.items()}


def rows_named(settings: FeatCalSettings, inputs: Any) -> str:
    """`decoder_rows`; for `auto` what it means for a batch of a model's inputs."""
    if settings.decoder_rows != "auto":
        return settings.decoder_rows
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    return "targets" if isinstance(labels, Tensor) and labels.ndim == 2 else "all"


def weighs_by_sensitivity(settings: FeatCalSettings, model: nn.Module) -> bool:
    """Tell whether rows weigh as final features depend on them, given the model for `auto`."""
    if settings.row_weights != "auto":
        return settings.row_weights == "sensitivity"
    return is_language_model(model)


def batch_generator(purpose: str, seed: int, task: str, *numbers: int) -> torch.Generator:
    """Random numbers for one purpose and place: the task and, say, the samples before a batch."""
    text = " ".join(map(str, (purpose, seed, task, *numbers)))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))


@contextmanager
def naming_task(task: str) -> Iterator[None]:
    """Context whose calibration errors say which task they are about."""
    try:
        yield
    except CalibrationError as error:
        raise CalibrationError(f"task {task}: {error}") from error
    except IndexError as error:  # of a look-up table that `vocabulary_size` does not know
        raise CalibrationError(
            f"task {task}: an input is outside a table of the model ({error}). Check that token "
            "ids come from the model's own tokenizer"
        ) from error


def check_inputs(
    base: Any, experts: Mapping[str, Any], batches: Mapping[str, Any], settings: FeatCalSettings
) -> None:
    """Check what a calibration was given against its settings.

    Args:
        base: The base model or its source, or None.
        experts: Experts by task.
        batches: Batches by task.
        settings: Settings.

    Raises:
        ValueError: If rho needs a base that is not there.
        CalibrationError: If a task lacks its expert or its data, or has one batch in place of
            several.
    """
    if base is None and settings.needs_base:
        raise ValueError(
            f"method.anchor_rho = {settings.anchor_rho} needs the base model "
            "(modelpool.models._pretrained_); without one set method.anchor_rho to 1"
        )
    without_expert = sorted(set(batches) - set(experts))
    without_data = sorted(set(experts) - set(batches))
    if without_expert:
        raise CalibrationError(
            f"tasks {without_expert} have calibration data but no expert; experts are "
            f"{sorted(experts)}. Check modelpool.models"
        )
    if without_data:
        raise CalibrationError(
            f"tasks {without_data} have an expert but no calibration data; there is data for "
            f"{sorted(batches)}. Check modelpool.train_datasets"
        )
    for task, given in batches.items():
        if isinstance(given, Tensor | Mapping | str):
            shape = f" {list(given.shape)}" if isinstance(given, Tensor) else ""
            raise CalibrationError(
                f"task {task}: batches are one {type(given).__name__}{shape}, but must be an "
                "iterable of batches: put a single batch into a list, [batch]"
            )
    if unknown := sorted(set(settings.task_factors) - set(experts)):
        raise CalibrationError(
            f"method.task_weights names tasks {unknown} that have no expert; experts are "
            f"{sorted(experts)}"
        )
    if not experts:
        raise CalibrationError("there is no expert to calibrate towards. Check modelpool.models")


def take_samples(
    task: str, batches: Iterable[Any], settings: FeatCalSettings, model: nn.Module
) -> Iterator[Batch]:
    """Yield `samples_per_task` samples, the last batch cut to fit, or all where there are fewer.

    Args:
        task: The task.
        batches: Its batches. With an attribute `samples` too few of them cause no warning.
        settings: `samples_per_task` is used.
        model: Takes the samples; token ids are checked against its vocabulary.

    Raises:
        CalibrationError: If there is no sample, or a token id is not in the vocabulary.
    """
    wanted, taken = settings.samples_per_task, 0
    announced = getattr(batches, "samples", None)
    for index, batch in enumerate(batches):
        inputs = tuple(batch) if isinstance(batch, list) else batch  # as DataLoader collates rows
        size = batch_size(task, inputs)
        if size > wanted - taken:
            inputs, size = part_of(inputs, size, slice(wanted - taken)), wanted - taken
        check_token_ids(inputs, model, partial(_place, task, batches, taken))
        taken += size
        yield Batch(inputs, size, index, start=taken - size)
        if taken == wanted:
            return
    if taken == 0:
        raise CalibrationError(
            f"task {task} has 0 calibration samples. Give it data (modelpool.train_datasets.{task})"
        )
    if announced is None:
        warn_of_few_samples(task, taken, wanted)


def warn_of_few_samples(task: str, available: int, wanted: int) -> None:
    """Warn that a task has fewer samples than asked for."""
    log.warning(
        "task %s has %s, fewer than method.samples_per_task = %d: all of them are used",
        task,
        counted(available, "sample"),
        wanted,
    )


def _place(task: str, batches: Any, taken: int, row: int) -> str:
    """A sample's name in messages: its data set's where the batches know it."""
    at = getattr(batches, "at", None)
    return f"task {task}, sample {taken + row}" if at is None else at(taken + row)


def vocabulary_size(model: nn.Module) -> int | None:
    """Rows of a language model's table of token embeddings; None for any other model."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        table = None if find is None else find()
    except NotImplementedError:
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def check_token_ids(inputs: Any, model: nn.Module, place: Callable[[int], str]) -> None:
    """Refuse token ids that a language model has no embedding for.

    Args:
        inputs: One batch.
        model: The model; nothing is checked for one without token embeddings.
        place: Names a row of the batch in messages.

    Raises:
        CalibrationError: For ids that are floating point, negative, or beyond the vocabulary.
    """
    size = vocabulary_size(model)
    if size is None or not isinstance(inputs, Mapping):
        return
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    names = ("input_ids", "decoder_input_ids", *(("labels",) if decodes else ()))
    for name in names:
        ids = inputs.get(name)
        if not isinstance(ids, Tensor):
            continue
        if ids.is_floating_point():
            raise CalibrationError(f"{place(0)}: {name} are {ids.dtype}, not integers")
        wrong = (ids < 0) | (ids >= size)
        if name == "labels":
            wrong &= ids != -100  # what transformers' losses ignore
        if ids.ndim == 2 and wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            raise CalibrationError(
                f"{place(row)}: {name} has the token id {ids[row, column].item()}, but the model's "
                f"vocabulary is 0..{size - 1}. Check that the ids come from its own tokenizer"
            )


def _tensors(inputs: Any) -> list[Tensor]:
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    values = [inputs] if isinstance(inputs, Tensor) else values
    return [value for value in values if isinstance(value, Tensor)]


def batch_size(task: str, inputs: Any) -> int:
    """Number of samples in a batch of a model's inputs.

    Raises:
        CalibrationError: If there is no tensor with samples in it.
    """
    tensors = _tensors(inputs)
    if not tensors or tensors[0].ndim == 0:
        raise CalibrationError(
            f"task {task}: a calibration batch must be a tensor, or a mapping or tuple with "
            f"tensors, batch first; got {type(inputs).__name__}"
        )
    return len(tensors[0])


def _map_tensors(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    def apply(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) else value

    if isinstance(inputs, Mapping):
        return {key: apply(value) for key, value in inputs.items()}
    return tuple(map(apply, inputs)) if isinstance(inputs, tuple) else apply(inputs)


def part_of(inputs: Any, size: int, samples: slice) -> Any:
    """Some samples of a batch of `size` of a model's inputs."""

    def cut(value: Tensor) -> Tensor:
        return value[samples] if value.ndim > 0 and len(value) == size else value

    return _map_tensors(inputs, cut)


def check_finite_inputs(inputs: Any, task: str, index: int) -> None:
    """Refuse a batch whose floating-point inputs hold NaN or infinity.

    Args:
        inputs: The batch.
        task: Its task, for the message.
        index: Its number in the task, from 0.

    Raises:
        CalibrationError: Naming batch, input and setting.
    """
    named = inputs.items() if isinstance(inputs, Mapping) else enumerate(_tensors(inputs))
    for name, value in named:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        if is_float and not all_finite(value):
            raise CalibrationError(
                f"calibration batch {index}, input {name!r}, has NaN or infinite values. Check "
                f"modelpool.train_datasets.{task}"
            )


def to_device(inputs: Any, device: torch.device) -> Any:
    """A batch of model inputs with all its tensors on a device."""
    return _map_tensors(inputs, lambda value: value.to(device))
