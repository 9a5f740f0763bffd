"""Positions of a batch that count, computed once and used at every block."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fusion_bench_featcal.modules.sites import matches
from fusion_bench_featcal.plurals import counted as counted_as
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True)
class CountedRows:
    """Positions that count, if not all do. The mask is transferred to the host once.

    Attributes:
        shape: Shape of the mask, `[batch, positions]`.
        index: Positions that count in the flattened mask, or None for all.
        weights: Their weights, `[n]`. With None all weigh 1.
        has_tables: Whether features with other positions can only be tables, because the model has
            no other sequence.
    """

    shape: torch.Size
    index: Tensor | None = None
    weights: Tensor | None = None
    has_tables: bool = False

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Return the weights of all positions, `[batch, positions]`."""
        tensor = self.weights if self.index is None else self.index
        flat = torch.zeros(self.shape.numel(), dtype=dtype, device=getattr(tensor, "device", None))
        flat[slice(None) if self.index is None else self.index] = (
            1 if self.weights is None else self.weights.to(dtype)
        )
        return flat.view(self.shape)

    @classmethod
    def of_mask(cls, mask: Tensor, *, has_tables: bool = False) -> "CountedRows":
        """Return the positions above 0 of a mask `[batch, positions]`, weighted by its entries.

        Raises:
            CalibrationError: If an entry is negative or not finite, or a sample has no counted
                position.
        """
        if bool((mask < 0).any()) or not bool(torch.isfinite(mask).all()):
            raise CalibrationError(
                "the mask of positions that count holds entries that are negative or not finite. "
                "Check the data (modelpool.train_datasets)"
            )
        empty = (mask.flatten(1) > 0).any(1).logical_not().nonzero().flatten().tolist()
        if empty:  # it would feed noise to others, through attention
            raise CalibrationError(
                f"no position of {len(empty)} of {counted_as(len(mask), 'sample')} of a batch "
                f"counts (rows {empty[:5]}): they are all padding, or have no target (labels all "
                "-100). Check the data (modelpool.train_datasets, method.max_length), or set "
                "method.decoder_rows=all where targets are missing"
            )
        return replace(cls.of_weights(mask), has_tables=has_tables)

    @classmethod
    def of_weights(cls, mask: Tensor) -> "CountedRows":
        """Return the same for any mask `[batch, ...]`. Samples without a counted position pass."""
        flat = mask.reshape(-1)
        index = (flat > 0).nonzero().flatten()
        weights = flat[index]
        return cls(
            mask.shape,
            None if len(index) == len(flat) else index,
            None if bool((weights == 1).all()) else weights,
        )

    def fits(self, features: Tensor) -> bool:
        """Return whether features `[..., d]` have the mask's positions, perhaps flattened."""
        return features.shape[:-1] in (self.shape, (self.shape.numel(),))

    def is_table(self, features: Tensor) -> bool:
        """Return whether features `[1, n, d]` belong to no sample, such as relative positions.

        All rows of a table count. Unless `has_tables`, the features could also be another sequence
        of a batch's only sample, or all samples in one row.
        """
        if features.ndim != 3 or len(features) != 1 or self.fits(features):
            return False
        other = self.shape[0] == 1 or features.shape[1] == self.shape.numel()
        return self.has_tables or not other

    def of(self, features: Tensor) -> Tensor:
        """Return the rows of features `[..., d]` that count, `[n, d]`. All rows of a table count.

        Raises:
            CalibrationError: If the features have other positions than the mask.
        """
        if self.is_table(features):
            return features[0]
        if not self.fits(features):
            raise CalibrationError(
                f"receives rows {tuple(features.shape[:-1])}, but padding is known for "
                f"{tuple(self.shape)}"
            )
        flat = features.reshape(-1, features.shape[-1])
        return flat if self.index is None else flat.index_select(0, self.index)


Counted = tuple[CountedRows, ...]
"""Positions that count: in a whole batch and, with several folds, in each fold's samples."""


def counted_by_fold(mask: Tensor, folds: int, *, has_tables: bool = False) -> Counted:
    """Return the counted positions of a mask `[batch, positions]`, divided by fold.

    Raises:
        CalibrationError: If an entry is negative or not finite, or a sample has no counted
            position.
    """
    counted = CountedRows.of_mask(mask, has_tables=has_tables)
    starts = range(folds if folds > 1 else 0)
    return (counted, *(CountedRows.of_weights(mask[start::folds]) for start in starts))


@dataclass(frozen=True)
class Rows:
    """Counted positions of a stage.

    Attributes:
        valid: Positions in the stage's hidden features, or None for all.
        other: Positions in modules with other inputs, by the end of their names.
        compared: Positions of the stage's final features that are read, or None for all.
        samples: Number of samples in the batch.
    """

    valid: Counted | None = None
    other: Mapping[str, Counted | None] = field(default_factory=dict)
    compared: CountedRows | None = None
    samples: int = 0

    @property
    def counted(self) -> CountedRows | None:
        """Return the counted positions of the stage's hidden features, or None for all."""
        return None if self.valid is None else self.valid[0]

    def of(self, module: str) -> Counted | None:
        """Return the counted positions of a module's input, or None for all."""
        return next((rows for end, rows in self.other.items() if matches(module, end)), self.valid)


def rows_of(features: Tensor, counted: CountedRows | None) -> Tensor:
    """Return features `[..., d]` as rows `[n, d]`: counted ones, or all if there is no mask."""
    return features.reshape(-1, features.shape[-1]) if counted is None else counted.of(features)
