"""Positions of a batch that count, looked at once and used at every block."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.patches import Patches
from fusion_bench_featcal.modules.sites import matches
from fusion_bench_featcal.plurals import counted as counted_as
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True)
class CountedRows:
    """Positions that count, where not all of them do. The host reads a mask once.

    Attributes:
        shape: Shape of the mask, `[batch, positions]`.
        index: Positions that count in the flattened mask; None: all.
        weights: Their weights, `[n]`; None: all weigh 1.
        has_tables: Whether features of other positions can only be tables: there is no other
            sequence in the model.
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
            CalibrationError: If an entry is negative or not finite, or a sample has no position.
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
        """Return the same for any mask `[batch, ...]`, of which samples may be empty."""
        flat = mask.reshape(-1)
        index = (flat > 0).nonzero().flatten()
        weights = flat[index]
        return cls(
            mask.shape,
            None if len(index) == len(flat) else index,
            None if bool((weights == 1).all()) else weights,
        )

    def fits(self, features: Tensor) -> bool:
        """Return whether features `[..., d]` are of the mask's positions, perhaps flattened."""
        return features.shape[:-1] in (self.shape, (self.shape.numel(),))

    def is_table(self, features: Tensor) -> bool:
        """Return whether features `[1, n, d]` are of no sample, such as relative positions.

        All their rows count. Unless `has_tables`, they might be another sequence of a batch's only
        sample, or all samples in one row.
        """
        if features.ndim != 3 or len(features) != 1 or self.fits(features):
            return False
        other = self.shape[0] == 1 or features.shape[1] == self.shape.numel()
        return self.has_tables or not other

    def of(self, features: Tensor) -> Tensor:
        """Return the rows of features `[..., d]` that count, `[n, d]`; all of a table.

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
"""Positions that count: all of a batch, and, with several folds, those of each fold's samples."""


def counted_by_fold(mask: Tensor, folds: int, *, has_tables: bool = False) -> Counted:
    """Return the positions that count by a mask `[batch, positions]`, divided by fold.

    Raises:
        CalibrationError: If an entry is negative or not finite, or a sample has no position.
    """
    counted = CountedRows.of_mask(mask, has_tables=has_tables)
    starts = range(folds if folds > 1 else 0)
    return (counted, *(CountedRows.of_weights(mask[start::folds]) for start in starts))


@dataclass(frozen=True)
class Rows:
    """Positions that count in a stage.

    Attributes:
        valid: Those of the stage's hidden features; None: all.
        other: Those of modules that receive other rows, by the end of their names.
        compared: Those of the stage's final features that are read; None: all.
        samples: Number of samples in the batch.
    """

    valid: Counted | None = None
    other: Mapping[str, Counted | None] = field(default_factory=dict)
    compared: CountedRows | None = None
    samples: int = 0

    @property
    def counted(self) -> CountedRows | None:
        """Return the positions of the stage's hidden features that count; None: all."""
        return None if self.valid is None else self.valid[0]

    def of(self, module: str) -> Counted | None:
        """Return the positions that count in a module's input; None: all."""
        return next((rows for end, rows in self.other.items() if matches(module, end)), self.valid)


def rows_of(features: Tensor, counted: CountedRows | None) -> Tensor:
    """Return features `[..., d]` as rows `[n, d]`: those that count, or without a mask all."""
    return features.reshape(-1, features.shape[-1]) if counted is None else counted.of(features)


def folded_rows(
    x: Tensor,
    y: Tensor | None,
    patches: Patches | None,
    counted: Counted | None,
    *,
    has_outputs: bool,
    start: int,
    samples: int,
    folds: int,
) -> Iterator[tuple[int, Tensor, Tensor | None, Tensor | None]]:
    """Divide the rows of one batch by fold: sample `i` of a task is in fold `i mod F`.

    Args:
        x: Inputs of a module.
        y: Further features of the same samples: inputs or outputs.
        patches: Geometry of the module if it is a convolution.
        counted: Positions that count; None: all.
        has_outputs: Whether `y` are outputs.
        start: Number of the first sample.
        samples: Number of samples.
        folds: Number of folds `F`.

    Yields:
        A fold, its rows `[n, d]` of `x` and of `y`, and their weights (None: all 1).

    Raises:
        CalibrationError: If padding or folds cannot be told in the inputs.
    """
    if patches is not None and counted is not None:
        raise CalibrationError("is a convolution, whose patches no mask of positions fits")
    if folds > 1 and counted is not None and counted[0].is_table(x):
        raise CalibrationError(
            "receives a table of relative positions, which method=featcal/plus does not support"
        )
    for number in range(folds):
        of_x, of_y = (
            part if part is None or folds == 1 else by_sample(part, samples)[number::folds]
            for part in (x, y)
        )
        assert of_x is not None
        if not len(of_x):
            continue
        fold = (start + number) % folds
        if patches is not None:
            for rows_x, rows_y in _unfolded(of_x, of_y, patches, has_outputs):
                yield fold, rows_x, rows_y, None
            continue
        chosen = None if counted is None else counted[number + 1 if folds > 1 else 0]
        weights = None if chosen is None or chosen.is_table(of_x) else chosen.weights
        yield fold, rows_of(of_x, chosen), None if of_y is None else rows_of(of_y, chosen), weights


def by_sample(rows: Tensor, samples: int) -> Tensor:
    """Return flattened rows `[samples * n, d]` as `[samples, n, d]`, others as they are."""
    is_flat = rows.ndim == 2 and len(rows) != samples and len(rows) % samples == 0
    return rows.unflatten(0, (samples, -1)) if is_flat else rows


def _unfolded(
    x: Tensor, y: Tensor | None, patches: Patches, has_outputs: bool
) -> Iterator[tuple[Tensor, Any]]:
    """Unfold a convolution's inputs, some samples at a time."""
    if y is None or not has_outputs:
        for pieces in patches.pieces([x] if y is None else [x, y]):
            rows = [piece.flatten(0, 1) for piece in pieces]
            yield rows[0], rows[1] if len(rows) > 1 else None
        return
    done = 0
    for (piece,) in patches.pieces([x]):
        of_y = y[done : done + len(piece)]
        yield piece.flatten(0, 1), of_y.flatten(2).mT.flatten(0, 1)
        done += len(piece)
