"""A batch of samples on its way through the blocks, and its positions that count."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.linear import at_least_float32
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.families.base import Masks
from fusion_bench_featcal.modules.sites import matches


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions that count. The mask is transferred to the host once.

    Instances are compared by identity (`eq=False`), because they are keys of cached values.

    Attributes:
        shape: Shape of the mask, `[batch, positions]`.
        index: Positions that count in the flattened mask, or None for all.
    """

    shape: torch.Size
    index: Tensor | None = None

    @classmethod
    def from_mask(cls, mask: Tensor) -> "Positions":
        """Return the positions above 0 of a mask `[batch, positions]`.

        Raises:
            CalibrationError: If a sample has no counted position.
        """
        empty = (mask.flatten(1) > 0).any(1).logical_not().nonzero().flatten().tolist()
        if empty:  # other positions would attend to noise
            raise CalibrationError(
                f"{len(empty)} of {pluralize(len(mask), 'sample')} of a batch (indices "
                f"{empty[:5]}) have no position that counts: they are all padding, or have no "
                f"target (labels all -100). Check the data and {option('max_length')}, or use "
                f"{option('decoder_rows', 'all')} if targets are missing"
            )
        flat = mask.reshape(-1)
        index = (flat > 0).nonzero().flatten()
        return cls(mask.shape, None if len(index) == len(flat) else index)

    @property
    def count(self) -> int:
        """Return the number of positions that count."""
        return self.shape.numel() if self.index is None else len(self.index)

    @classmethod
    def first_of(cls, features: Tensor) -> "Positions":
        """Return the first position of each sample of features `[batch, positions, d]`."""
        mask = features.new_zeros(features.shape[:-1])
        mask[:, 0] = 1
        return cls.from_mask(mask)

    def last_of_each(self) -> "Positions":
        """Return the last position of each sample that counts."""
        empty = torch.empty(0, dtype=torch.float32, device=getattr(self.index, "device", None))
        mask = self.marked(1.0, 0.0, empty).view(-1, self.shape[1:].numel())
        last = mask.shape[1] - 1 - mask.flip(1).argmax(1, keepdim=True)
        return self.from_mask(torch.zeros_like(mask).scatter_(1, last, 1).view(self.shape))

    def marked(self, counted: float, other: float, example: Tensor) -> Tensor:
        """Return one value for each position that counts and another for others, flat."""
        values = example.new_full((self.shape.numel(),), other)
        values[slice(None) if self.index is None else self.index] = counted
        return values

    def of(self, features: Tensor) -> Tensor:
        """Return the rows of features `[..., d]` that count, `[n, d]`.

        Raises:
            CalibrationError: If the features have other positions than the mask, flat or not. The
                caller adds the module's name.
        """
        if not self.are_those_of(features):
            raise CalibrationError(
                f"it receives positions of shape {tuple(features.shape[:-1])}, but the padding "
                f"mask has the shape {tuple(self.shape)}"
            )
        flat = features.reshape(-1, features.shape[-1])
        return flat if self.index is None else flat.index_select(0, self.index)

    def are_those_of(self, features: Tensor) -> bool:
        """Return whether features have the positions, flat or not.

        Latent attention has a dimension more, of one head for all.
        """
        shape = features.shape[:-1]
        if len(shape) > len(self.shape):
            kept, expected = ([size for size in sizes if size > 1] for sizes in (shape, self.shape))
            return kept == expected
        return shape in (self.shape, (self.shape.numel(),))


@dataclass(frozen=True)
class CountedPositions:
    """Counted positions of a stage.

    Attributes:
        by_end: By the end of a module's name, as in `families.base.Masks`.
        read: Positions that are read after the last block, or None if all of them are.
        mixing: Modules that mix positions. They count all positions equally.
        target_weight: Weight of the `read` positions in all other linear modules. Other positions
            have weight 1.
        is_last_block: Whether the block is the last one. Only `read` positions count there, except
            in modules that mix positions.
    """

    by_end: Mapping[str, Positions | None] = field(default_factory=dict)
    read: Positions | None = None
    mixing: frozenset[str] = frozenset()
    target_weight: float = 1.0
    is_last_block: bool = False

    @classmethod
    def from_masks(cls, masks: Masks) -> "CountedPositions":
        """Return the counted positions of masks. Modules with one mask share them."""
        counted = {
            id(mask): Positions.from_mask(mask) for mask in masks.values() if mask is not None
        }
        return cls({end: counted.get(id(mask)) for end, mask in masks.items()})

    @property
    def valid(self) -> Positions | None:
        """Return the counted positions in the stage's features, or None for all."""
        return self.of("")

    def of(self, module: str) -> Positions | None:
        """Return the counted positions of a module's input, or None for all."""
        counted, mixes = self.positions_key(module)
        return counted if self.read is None or mixes or not self.is_last_block else self.read

    def weights_of(self, module: str, rows: Tensor) -> Tensor | None:
        """Return the weights of a module's rows of counted positions, `[n]`, or None if equal."""
        if self.target_weight == 1 or self.is_last_block or self.positions_key(module)[1]:
            return None
        empty = at_least_float32(rows.new_empty(0))
        if self.read is None:
            return empty.new_ones(len(rows))
        return rows_of(self.read.marked(self.target_weight, 1.0, empty)[:, None], self.valid)[:, 0]

    def positions_key(self, module: str) -> tuple[Positions | None, bool]:
        """Return a key that is equal for modules that count the same positions in every batch."""
        mixes = module in self.mixing or self.has_own(module)
        return self.by_end.get(self._end_of(module)), mixes

    def has_own(self, module: str) -> bool:
        """Return whether a module counts other positions than the stage's features."""
        return self._end_of(module) != ""

    def _end_of(self, module: str) -> str:
        return next((end for end in self.by_end if end and matches(module, end)), "")


def rows_of(features: Tensor, counted: Positions | None) -> Tensor:
    """Return features `[..., d]` as rows `[n, d]`: counted ones, or all if there is no mask."""
    return features.reshape(-1, features.shape[-1]) if counted is None else counted.of(features)


@dataclass
class Batch:
    """Samples that run together.

    Attributes:
        inputs: The model's inputs, or None after the last stage has begun.
        samples: Number of samples.
        start: Number of the task's samples before it.
        copy: Index of the augmented copy of the samples, or 0 for the original samples.
        held_out: Samples held out to choose ridges, bool `[samples]`, or None.
        calibrated_call: Input of the calibrated model's next block.
        expert_call: Input of the expert's next block, or None if experts do not run.
        skips_stage: Whether the samples skip the stage, such as texts in a vision tower.
        positions: Positions that count in the stage.
        later_positions: Number of counted positions after the first one of each sample.
        expert_inputs: The expert's inputs of modules that are not solved yet.
    """

    inputs: Any
    samples: int
    start: int = 0
    copy: int = 0
    held_out: Tensor | None = None
    calibrated_call: Any = None
    expert_call: Any = None
    skips_stage: bool = False
    positions: CountedPositions = field(default_factory=CountedPositions)
    later_positions: int = 0
    expert_inputs: dict[str, Tensor] = field(default_factory=dict)
    _split: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def restarted(self) -> "Batch":
        """Return the same samples before the first block."""
        return Batch(self.inputs, self.samples, self.start, self.copy, self.held_out)

    def fitted_and_held_out(self, samples: range, counted: Positions | None, rows: Tensor) -> Any:
        """Return the positions of rows of fitted samples and of held-out ones, computed once.

        Args:
            samples: The samples with the rows, in the batch.
            counted: The positions that count, or None if every sample has equally many rows.
            rows: The rows, `[n, d]`.
        """
        assert self.held_out is not None  # the rule holds samples out
        key = samples, counted, len(rows)
        if key not in self._split:
            if counted is None or counted.index is None:
                held_out = self.held_out[samples.start : samples.stop]
                held_out = held_out.repeat_interleave(len(rows) // len(samples))
            else:
                held_out = self.held_out[counted.index.cpu() // counted.shape[1:].numel()]
            pair = (~held_out).nonzero().flatten(), held_out.nonzero().flatten()
            self._split[key] = pair[0].to(rows.device), pair[1].to(rows.device)
        return self._split[key]
