"""Calibration samples on their way through the blocks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.engine.activations import STAY, Activations
from fusion_bench_featcal.engine.rows import CountedRows
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings


@dataclass
class Batch:
    """One batch of a task on its way through the blocks.

    What it carries from block to block waits where `waits` puts it: to set one of `cal`, `exp` and
    `exp_hidden` is to put it away, to read it to fetch it, and to begin fetching the next batch's.

    Attributes:
        inputs: The model's inputs, kept only where a later stage begins from them.
        samples: Number of samples.
        valid: The positions that count; None: all do.
        other: The same for modules that receive other rows, by the end of their names.
        waits: Where features wait between blocks.
        following: The task's next batch.
    """

    inputs: Any
    samples: int
    valid: CountedRows | None = None
    other: Mapping[str, CountedRows | None] = field(default_factory=dict)
    waits: Activations = field(default=STAY, repr=False)
    following: "Batch | None" = field(default=None, repr=False)
    _slots: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def cal(self) -> Any:
        """What the next block of the calibrated model receives."""
        return self._fetched("cal")

    @cal.setter
    def cal(self, value: Any) -> None:
        self._put_away("cal", value)

    @property
    def exp(self) -> Any:
        """What the expert's next block receives; None where expert features are not used."""
        return self._fetched("exp")

    @exp.setter
    def exp(self, value: Any) -> None:
        self._put_away("exp", value)

    @property
    def exp_hidden(self) -> Tensor | None:
        """The expert's output of the block in hand."""
        return self._fetched("exp_hidden")

    @exp_hidden.setter
    def exp_hidden(self, value: Tensor | None) -> None:
        self._put_away("exp_hidden", value)

    def _put_away(self, slot: str, value: Any) -> None:
        self.waits.keep_hot(self, slot, value)
        # What was there goes afterwards: masks that come back are stored in it.
        self._slots[slot] = self.waits.put(value)

    def _fetched(self, slot: str) -> Any:
        value = self.waits.hot(self, slot)
        if value is None:
            value = self.waits.fetch(self._slots.get(slot))
            self.waits.keep_hot(self, slot, value)
        if self.following is not None:
            self.waits.prefetch(self.following._slots.get(slot))
        return value

    def find_rows(self, family: Any, inputs: Any, stage_index: int, decoder_rows: str) -> None:
        """Ask a family which rows of a stage count.

        Raises:
            CalibrationError: If a mask is unusable, or a sample has none: what it would feed to
                other rows is noise.
        """
        told: dict[int, tuple[Tensor, CountedRows]] = {}

        def rows(mask: Tensor | None) -> CountedRows | None:
            if mask is None:
                return None
            if id(mask) not in told:  # modules with one mask may share a statistic
                told[id(mask)] = mask, CountedRows.told_by(mask)
            return told[id(mask)][1]

        self.valid = rows(family.row_weights(inputs, stage_index, decoder_rows))
        others = family.other_rows(inputs, stage_index)
        self.other = {end: rows(mask) for end, mask in others.items()}


@contextmanager
def naming_task(task: str) -> Iterator[None]:
    """Context whose calibration errors say which task they are about."""
    try:
        yield
    except CalibrationError as error:
        raise CalibrationError(f"task {task}: {error}") from error


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
        CalibrationError: If a task lacks its expert or its data.
    """
    if base is None and settings.anchor_rho != 1:
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
    if not experts:
        raise CalibrationError("there is no expert to calibrate towards. Check modelpool.models")


def take_samples(task: str, batches: Iterable[Any], settings: FeatCalSettings) -> Iterator[Batch]:
    """Exactly `samples_per_task` samples, the last batch cut to fit.

    Raises:
        CalibrationError: If the data ends before.
    """
    wanted, taken = settings.samples_per_task, 0
    for batch in batches:
        inputs = tuple(batch) if isinstance(batch, list) else batch  # as DataLoader collates rows
        size = _batch_size(task, inputs)
        if size > wanted - taken:
            inputs, size = _first(inputs, size, wanted - taken), wanted - taken
        taken += size
        yield Batch(inputs, size)
        if taken == wanted:
            return
    raise CalibrationError(
        f"task {task} has {taken} calibration samples, fewer than method.samples_per_task = "
        f"{wanted}. Lower it, or give the task more data (modelpool.train_datasets.{task})"
    )


def _tensors(inputs: Any) -> list[Tensor]:
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    values = [inputs] if isinstance(inputs, Tensor) else values
    return [value for value in values if isinstance(value, Tensor)]


def _batch_size(task: str, inputs: Any) -> int:
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


def _first(inputs: Any, size: int, count: int) -> Any:
    def cut(value: Tensor) -> Tensor:
        return value[:count] if value.ndim > 0 and len(value) == size else value

    return _map_tensors(inputs, cut)


def to_device(inputs: Any, device: torch.device) -> Any:
    """A batch of model inputs with all its tensors on a device."""
    return _map_tensors(inputs, lambda value: value.to(device))
