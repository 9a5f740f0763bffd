"""Rows of a batch's features that count: found once and used at every block."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusion_bench_featcal.core.patches import Patches
from fusion_bench_featcal.plurals import counted as counted_as
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True)
class CountedRows:
    """Rows that count, where not all of them do.

    The host looks at a mask once, before the first block; no block has to look at it again.

    Attributes:
        shape: The mask's, `[batch, positions]`.
        count: How many rows count.
        index: Which they are, in the flattened mask; None: all.
        weights: Their weights, `[count]`; None: all weigh 1.
        has_tables: Whether features of other positions can only be tables: there is no other
            sequence in the model.
    """

    shape: torch.Size
    count: int
    index: Tensor | None = None
    weights: Tensor | None = None
    has_tables: bool = False

    @classmethod
    def of_mask(cls, mask: Tensor, *, has_tables: bool = False) -> "CountedRows":
        """The rows that count by a mask: those above 0, with its entries as their weights.

        Args:
            mask: `[batch, positions]`.
            has_tables: As the attribute.

        Raises:
            CalibrationError: If an entry is negative or not finite, or a sample has no row.
        """
        if bool((mask < 0).any()) or not bool(torch.isfinite(mask).all()):
            raise CalibrationError(
                "the mask of positions that count holds entries that are negative or not finite. "
                "Check the data (modelpool.train_datasets)"
            )
        counted = cls.of_weights(mask)
        _refuse_empty_samples(counted, mask)
        return replace(counted, has_tables=has_tables)

    @classmethod
    def of_weights(cls, mask: Tensor) -> "CountedRows":
        """The same for a mask of which no more is asked, `[batch, ...]`; samples may be empty."""
        flat = mask.reshape(-1)
        index = (flat > 0).nonzero().flatten()
        weights = flat[index]
        return cls(
            mask.shape,
            len(index),
            None if len(index) == len(flat) else index,
            None if bool((weights == 1).all()) else weights,
        )

    def fits(self, features: Tensor) -> bool:
        """Return whether features `[..., d]` are of the mask's positions, perhaps in one list."""
        return features.shape[:-1] in (self.shape, (self.shape.numel(),))

    def is_table(self, features: Tensor) -> bool:
        """Return whether features `[1, n, d]` are of no sample, as relative positions are not.

        All their rows count. Unless `has_tables`, they might be another sequence of a batch's only
        sample, or all samples in one row.
        """
        if features.ndim != 3 or len(features) != 1 or self.fits(features):
            return False
        other = self.shape[0] == 1 or features.shape[1] == self.shape.numel()
        return self.has_tables or not other

    def of(self, features: Tensor) -> Tensor:
        """The rows that count of features `[*shape, d]`, `[count, d]`; all of a table.

        Raises:
            ValueError: If the features have other positions than the mask.
        """
        if self.is_table(features):
            return features[0]
        if not self.fits(features):
            raise ValueError(
                f"features {tuple(features.shape)} do not fit a mask {tuple(self.shape)}"
            )
        return self.of_flat(features.reshape(-1, features.shape[-1]))

    def mask(self) -> Tensor:
        """The mask that they are of, `[batch, positions]`."""
        device = self.weights.device if self.index is None and self.weights is not None else None
        if self.index is not None:
            device = self.index.device
        mask = torch.zeros(self.shape.numel(), device=device)
        index = slice(None) if self.index is None else self.index
        mask[index] = 1.0 if self.weights is None else self.weights.to(mask.dtype)
        return mask.reshape(self.shape)

    def of_flat(self, values: Tensor) -> Tensor:
        """Entries of the rows that count, of what has one for each position, in the first place."""
        return values if self.index is None else values.index_select(0, self.index)


def rows_of(features: Tensor, counted: CountedRows | None) -> Tensor:
    """Features `[..., d]` as rows, `[n, d]`: those that count, or, without a mask, all."""
    if counted is not None:
        return counted.of(features)
    return features.reshape(-1, features.shape[-1])


def pieces_of(
    features: Sequence[Tensor | None], counted: CountedRows | None, patches: Patches | None
) -> Iterator[list[Tensor | None]]:
    """Rows `[n, d]` of features of the same samples, a convolution's patches some at a time.

    Args:
        features: Inputs of a module; None stays None.
        counted: The rows that count; None: all, as for every convolution.
        patches: Geometry of the module if it is a convolution.
    """
    if patches is None:
        yield [None if part is None else rows_of(part, counted) for part in features]
        return
    for parts in patches.pieces([part for part in features if part is not None]):
        rows = iter(parts)
        yield [None if part is None else next(rows).flatten(0, 1) for part in features]


def _refuse_empty_samples(counted: CountedRows, mask: Tensor) -> None:
    """A sample of which no row counts would feed noise to others (through attention)."""
    if counted.index is None:
        return
    index = counted.index
    positions = mask[0].numel() if len(mask) else 1
    empty = sorted(set(range(len(mask))) - set((index // positions).tolist()))
    if empty:
        raise CalibrationError(
            f"no position of {len(empty)} of {counted_as(len(mask), 'sample')} of a batch counts "
            f"(rows {empty[:5]}): they are all padding, or have no target (labels all "
            "-100). Check the data (modelpool.train_datasets, method.max_length), or set "
            "method.decoder_rows=all where targets are missing"
        )
